"""`TrainingSession`: the steps of a run, for a training loop that the caller writes.

>>> with TrainingSession.open(load_recipe("recipes/quickstart.yaml")) as session:
...     for batch in batches:
...         scores = session.forward_backward(batch, "cross_entropy")
...         session.optim_step(AdamParams(learning_rate=1e-3))
...     session.publish()
...     answers = session.sample(prompt, SamplingParams(max_tokens=40), count=8)
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.algorithms.datum_losses import DatumLoss, check_inputs, checked_loss
from megarl.assembly import Started, connect_engines, connected
from megarl.batching.datums import AdamParams, Datum, DatumScores
from megarl.cluster import is_controller, serve
from megarl.cluster.base import Cluster
from megarl.commands.serve.prepare import ServedModel, prepare_served_model
from megarl.commands.serve.states import SavedState, StateStore, state_identity
from megarl.errors import as_input_error
from megarl.recipe import Recipe
from megarl.recipe.derived.offload import offloads
from megarl.rollout.completions.handle import MOST_ALTERNATIVES, CompletionHandle, start_completion_engines
from megarl.rollout.start_engines import load_engines, shares_devices, wait_for_start, wait_until_asleep
from megarl.trainer.datums.group import DatumGroup
from megarl.trainer.group import require_shared_storage
from megarl.trainer.start import Learners
from megarl.types import Completion, GenerationRequest, Prompt, Sampling, derived_seed
from megarl.weight_sync.placement import Colocated, Occupant, Placement

DATUM_WORKER = "megarl.trainer.datums.worker:DatumWorker"
MOST_SAMPLES = 1024  # of one request
_START = ("start", "start")  # the state of the starting model


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a request. stop_ids: tokens that end a response; None: the tokenizer's; (): none. prompt_top_k: also score the prompt,
    with this many likely tokens at each position; None: do not. Raises ValueError for impossible values."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_ids: tuple[int, ...] | None = None
    prompt_top_k: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < 100, "at least 0; 0 is greedy"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k == -1 or self.top_k >= 1, "-1 (all tokens) or at least 1"),
            "seed": (self.seed is None or 0 <= self.seed < 1 << 62, "from 0 to 2**62 - 1"),
            "prompt_top_k": (
                self.prompt_top_k is None or 0 <= self.prompt_top_k <= MOST_ALTERNATIVES,
                f"from 0 to {MOST_ALTERNATIVES}",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")


class TrainingSession:
    """Trainers and engines of a recipe, and the calls of a training loop. Call it from one thread; `begin_sample` from any.

    A call that raises ValueError has changed nothing, and the session goes on; after another exception it has ended.
    """

    def __init__(self, model: ServedModel, cluster: Cluster, *, resettable: bool) -> None:
        self.model, self.recipe, self.cluster, self.resettable = model, model.recipe, cluster, resettable
        engines, started = self._start()
        self.engines, self.actor = engines, started.learners.actor
        assert isinstance(self.actor, DatumGroup)
        self.group: DatumGroup = self.actor
        self.devices: Placement = connect_engines(self.recipe, started, _notice)
        identity = state_identity(self.recipe, model.config)
        self.states = StateStore(model.directory.path / "states", self.actor, identity, cluster.check)
        self.passes = 0  # forward_backward calls since the last optim_step
        self.updates = 0  # optim_step calls of this process
        self.version = -1  # of the engines' weights
        self.sampled_updates: int | None = (
            None  # `updates` when the engines received their weights; None: they cannot sample
        )
        self.is_fresh = True  # the trainers have the starting model
        self._requests, self._sampled = 0, 0
        self._running: dict[CompletionHandle, int] = dict.fromkeys(engines, 0)
        self._idle = threading.Condition()
        self.publish()

    @classmethod
    @contextlib.contextmanager
    def open(cls, recipe: Recipe, *, resettable: bool = False) -> Iterator[TrainingSession]:
        """Start the recipe's trainers and engines; end them with the block. resettable: save the starting model before the first
        change, for `reset`.

        Raises RecipeError or InputError before a process starts. Under torchrun, ranks other than 0 serve this session, and exit.
        """
        if not is_controller(recipe.cluster):
            serve(recipe)
            sys.exit(0)
        with as_input_error():
            model = prepare_served_model(recipe)
        for notice in model.notices:
            _notice(notice)
        try:
            with connected(model.recipe, model.platform, model.demand) as cluster:
                session = cls(model, cluster, resettable=resettable)
                yield session
                session.group.shutdown()
        finally:
            model.directory.unlock()

    # --- training -------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", options: Mapping[str, float | str] | None = None
    ) -> DatumScores:
        """Compute the loss of `data` and the log-probs of its targets, without gradients."""
        checked = self.check_data(data, loss, options)
        self._give_to_actor()
        return self.group.score(data, checked)

    def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", options: Mapping[str, float | str] | None = None
    ) -> DatumScores:
        """Compute the loss of `data`, and add its gradient to those since the last `optim_step`.

        The loss is a sum over tokens, without any mean: see `megarl.algorithms.datum_losses`.
        """
        checked = self.check_data(data, loss, options)
        self._give_to_actor()
        scores = self.group.add_gradient(data, checked)
        self.passes += 1
        return scores

    def optim_step(self, params: AdamParams) -> float:
        """Update the weights with the gradients since the last call. Returns the gradient norm before clipping.

        Raises ValueError without gradients, and if the norm is not finite: the gradients are forgotten, and the weights stay.
        """
        if params.learning_rate > 1:
            raise ValueError(f"learning_rate is {params.learning_rate:g}; it must be at most 1")
        if not self.passes:
            raise ValueError("optim_step has no gradient: call forward_backward first")
        self._give_to_actor()
        self._before_change()
        self.passes = 0
        norm, changed = self.group.update_weights(params)
        if not changed:
            raise ValueError(
                f"the gradient norm is {norm}, so the weights were not changed: look for infinite log-probs, weights or advantages"
            )
        self.updates += 1
        return norm

    def forget_gradients(self) -> None:
        """Forget the gradients since the last `optim_step`."""
        self.group.forget_gradients()
        self.passes = 0

    def check_data(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float | str] | None = None
    ) -> DatumLoss:
        """Return the loss. Raises ValueError if `data` does not fit it or the model."""
        checked = checked_loss(loss, options)
        if not data:
            raise ValueError("data is empty: give at least one datum")
        for number, datum in enumerate(data):
            where = f"datum {number}"
            check_inputs(
                checked, {name: len(vector) for name, vector in datum.vectors.items()}, len(datum.targets), where
            )
            if len(datum.tokens) > self.model.longest_datum:
                raise ValueError(
                    f"{where} has {len(datum.tokens)} tokens; the served model reads at most {self.model.longest_datum}"
                )
            _check_ids(datum.tokens, self.model.vocab_size, f"{where}: model_input")
            _check_ids(datum.targets, self.model.vocab_size, f"{where}: target_tokens")
            for name, vector in datum.vectors.items():
                if not np.isfinite(vector).all():
                    raise ValueError(f"{where}: {name} has entries that are not finite")
        return checked

    # --- sampling -------------------------------------------------------------------------------

    def check_publishable(self) -> None:
        """Raise ValueError if `publish` would lose gradients: trainers that offload for the engines do not keep them."""
        if self.passes and isinstance(self.devices, Colocated) and self.devices.actor.may_offload:
            raise ValueError(
                "the gradients since the last optim_step would be lost: trainers and engines share the devices. Call optim_step "
                "before the weights go to the engines"
            )

    def publish(self) -> int:
        """Send the weights to the engines, after all running requests. Returns the version. Raises as `check_publishable`."""
        self.check_publishable()
        self.close_sampling()
        self.devices.update_engines(self.version + 1)
        self.version += 1
        self.sampled_updates = self.updates
        return self.version

    def sample(self, prompt: Sequence[int], params: SamplingParams, count: int = 1) -> list[Completion]:
        """Sample `count` responses with the weights that were published last."""
        return self.begin_sample(prompt, params, count).result()

    def begin_sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, version: int | None = None
    ) -> Future[list[Completion]]:
        """Start `sample`. The result of the future has the responses, in the order of their seeds.

        version: of the weights that must sample; None: the newest. Raises ValueError if the engines do not have it.
        """
        request = self.request_for(prompt, params, count)
        with self._idle:
            if self.sampled_updates is None or version not in (None, self.version):
                raise ValueError(
                    "the engines no longer have these weights: they hold one version, and only until the next one is published or, "
                    "on devices that they share with the trainers, until the next training call. Publish the weights again"
                )
            requests = self._split(request)
            engine = min(self.engines, key=self._running.__getitem__)
            self._running[engine] += count
        answers = engine.complete(requests)
        result: Future[list[Completion]] = Future()

        def finish(done: Future[list[list[Completion]]]) -> None:
            with self._idle:
                self._running[engine] -= count
                self._idle.notify_all()
            if (error := done.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result([completion for each in done.result() for completion in each])

        answers.add_done_callback(finish)
        return result

    def request_for(self, prompt: Sequence[int], params: SamplingParams, count: int) -> GenerationRequest:
        """Return the engines' request. Raises ValueError if the prompt or the settings do not fit the model."""
        longest, total = self.model.longest_sample, len(prompt) + params.max_tokens
        if len(prompt) == 0 or total > longest:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; a prompt needs at least 1, and both "
                f"together at most {longest} (data.max_prompt_length + rollout.max_response_length of the recipe)"
            )
        _check_ids(np.asarray(prompt), self.model.vocab_size, "the prompt")
        if not 1 <= count <= MOST_SAMPLES:
            raise ValueError(f"num_samples is {count}; it must be from 1 to {MOST_SAMPLES}")
        stop = self.model.tokenizer.stop_ids if params.stop_ids is None else params.stop_ids
        if stop:
            _check_ids(np.asarray(stop), self.model.vocab_size, "stop")
        sampling = Sampling(count, params.max_tokens, params.temperature, params.top_p, params.top_k, tuple(stop))
        text = Prompt("a prompt of the caller", tuple(int(token) for token in prompt), "", "")
        return GenerationRequest(0, text, sampling, params.seed, prompt_top_k=params.prompt_top_k)

    def close_sampling(self) -> None:
        """Refuse further requests until `publish`, and wait for running ones. Raises if a process has died meanwhile."""
        with self._idle:
            self.sampled_updates = None
            while any(self._running.values()):
                self._idle.wait(timeout=1.0)
                self.cluster.check()

    # --- states ---------------------------------------------------------------------------------

    def save_state(self, model: str, name: str, **how: Any) -> Path:
        """Save weights and optimizer as `name` of `model`, and delete expired states. how: see `StateStore.save`."""
        self._give_to_actor()
        self.states.delete_expired()
        return self.states.save(model, name, **how)

    def load_state(self, saved: SavedState, *, with_optimizer: bool) -> None:
        """Load a state that `states.find` returned. Gradients are forgotten; without the optimizer, Adam starts anew."""
        self._give_to_actor()
        self._before_change()
        for notice in self.group.load_state(saved.path, with_optimizer=with_optimizer):
            if notice is not None:
                _notice(notice)
        self.passes, self.updates = 0, self.updates + 1

    def reset(self) -> None:
        """Bring the trainers back to the starting model and a new optimizer."""
        if self.passes:
            self.forget_gradients()
        if not self.is_fresh:
            assert self.resettable, "the session was opened without resettable=True"
            self.load_state(self.states.find(*_START), with_optimizer=False)
            self.is_fresh = True

    def export(self, folder: Path) -> None:
        """Write the trainers' weights as a Hugging Face model, with adapters merged."""
        self._give_to_actor()
        self.group.save_hf(folder)

    # --- processes ------------------------------------------------------------------------------

    def _start(self) -> tuple[list[CompletionHandle], Started]:
        recipe, limit = self.recipe, self.recipe.rollout.start_timeout
        platform, cluster = self.model.platform, self.cluster
        engines = start_completion_engines(recipe, platform, cluster)
        loading = load_engines(recipe.rollout, engines)
        descriptions: list[dict[str, Any]] = []
        shared = shares_devices(recipe.cluster, platform)
        if shared:
            descriptions = wait_until_asleep(engines, loading, limit, cluster.check)
        workers = cluster.start_trainers(DATUM_WORKER, recipe.cluster.trainers, (recipe, 1))
        actor = DatumGroup(workers, recipe)
        require_shared_storage(actor, self.model.directory.path)
        actor.describe()
        learners = Learners(actor, Occupant(actor, offload=offloads(recipe, platform.name)), None, None)
        descriptions = descriptions or wait_for_start(engines, loading, doing="load", limit=limit, check=cluster.check)
        return engines, Started([*engines], descriptions, [], [], learners, shared)

    def _before_change(self) -> None:
        """Save the starting model before the first change, if it may be wanted again."""
        if self.is_fresh and self.resettable:
            try:
                self.states.save(*_START, overwrite=True)
            except ValueError as error:
                raise ValueError(
                    f"the weights were not changed, since the starting model, with which later sessions begin, could not be saved first: {error}"
                ) from error
        self.is_fresh = False

    def _give_to_actor(self) -> None:
        if isinstance(self.devices, Colocated) and self.devices.engines_sleep:
            self.close_sampling()  # asleep, engines keep no weights
        self.devices.give_to_actor()

    def _split(self, request: GenerationRequest) -> list[GenerationRequest]:
        """Return a request per response, with its own number and seed: engines give the same answers however they are batched."""
        count = request.sampling.n
        seed = request.seed
        if seed is None:
            seed = derived_seed(self.recipe.train.seed, self._requests) >> 1
        self._requests += 1
        first, self._sampled = self._sampled, self._sampled + count
        single = replace(request, sampling=replace(request.sampling, n=1))
        scored = [request.prompt_top_k, *[None] * (count - 1)]  # one response is enough to score the prompt
        return [
            replace(single, group=first + index, seed=seed + index, prompt_top_k=scored[index])
            for index in range(count)
        ]


def _check_ids(ids: np.ndarray, vocab_size: int, place: str) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"{place} has token ids from {ids.min()} to {ids.max()}; the served model's vocabulary has {vocab_size}. Is it tokenized "
            "for another model?"
        )


def _notice(text: str, *_: Any) -> None:
    print(text, file=sys.stderr, flush=True)
