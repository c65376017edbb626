"""The source of RL batches: submit groups to engines, filter them (dynamic sampling), and fail if an engine dies.

Background threads receive the groups, so sampling continues while the controller trains.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.shaping import add_overlong_penalty, has_spread
from megarl.cluster.calls import StallTimer, attach
from megarl.data.dataset import sampler_of
from megarl.data.prompts import PromptDataset
from megarl.engines.tape import Record
from megarl.recipe.derived.at_update import is_continuous, update_rule, window_groups
from megarl.recipe.derived.seeded import samples_are_seeded
from megarl.recipe.schema import Recipe
from megarl.rollout.admission import Admission, AdmissionState, TriedGroup, accepted_groups
from megarl.rollout.dispatch import Dispatch, Finishing
from megarl.rollout.engine_handle import SamplingEngine
from megarl.rollout.metrics import agent_figures, sampled_figures
from megarl.rollout.source import Batch
from megarl.rollout.tape import Arrivals, Loaded
from megarl.rollout.unscored_groups import FailedShare, scoring_counts, scoring_notice
from megarl.rollout.waiting import Reason, Waiting
from megarl.types import DataRef, GenerationRequest, InlineData, Sampling, derived_seed


@dataclass(frozen=True)
class Arrival:
    """A group's arrival: the index of its engine, and whether the group may be trained on."""

    engine: int
    accepted: bool


class EnginesSource:
    """A `SampleSource` over rollout engines.

    `take` and `drain` raise the first error of an engine. A group that could not be scored is replaced by another group,
    unless their share exceeds `reward.max_failed_share`, which is an error.
    """

    def __init__(
        self,
        recipe: Recipe,
        prompts: PromptDataset,
        engines: Sequence[SamplingEngine],
        stop_token_ids: Sequence[int],
        check_processes: Callable[[], None],
        arrivals: Arrivals[Arrival] | None = None,
    ):
        """`check_processes` is called every second while waiting; it raises if a process of the run has died. `arrivals`:
        the order in which groups are handled; None: as they arrive, without a tape."""
        self.recipe, self.prompts, self.engines = recipe, prompts, list(engines)
        self.check_processes = check_processes
        self.sampler = sampler_of(prompts, recipe.data, recipe.train.seed)
        rollout, dynamic = recipe.rollout, recipe.algorithm.dynamic_sampling
        self.sampling = Sampling(
            n=rollout.samples_per_prompt,
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=tuple(stop_token_ids),
        )
        self.admission = Admission(
            recipe.data.prompts_per_step,
            rollout.max_staleness,
            dynamic.max_attempts if dynamic.enabled else None,
            is_continuous(recipe),
            batches=recipe.train.steps,
            window=window_groups(recipe),
        )
        self._failed_share = FailedShare(recipe.reward.max_failed_share, recipe.data.prompts_per_step)
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._with_greedy = ADVANTAGES[recipe.algorithm.advantage].needs_greedy
        self._seeded = samples_are_seeded(recipe)
        finishing = Finishing.of(update_rule(recipe), rollout.max_staleness, recipe.data.prompts_per_step)
        self._dispatch = Dispatch(len(self.engines), finishing)
        self._waiting = Waiting(len(self.engines))
        self._waiting.observe(len(self.engines), None)
        self._taking = False  # the trainers wait for a batch
        self._arrivals: Arrivals[Arrival] = arrivals or Arrivals()
        self._stall_timer = StallTimer(rollout.timeout, self._arrivals.stall_advice)
        self._drains, self._finishes = update_rule(recipe) == "drain", finishing is not None
        self._loads: dict[int, float] = {}  # engines that load weights from host memory -> begin
        self._load_seconds = 0.0  # of all engines together, since the last batch
        self._interrupted: list[int] = []  # groups that ran when the resumed checkpoint was saved
        self._drained: dict[str, Any] | None = None  # with drain: the state before the groups of the next batch started

    def admit(self, version: int) -> None:
        with self._change:
            self._stall_timer.reset()
            self._await_turn({"version": version})
            self._drained = self._state() if self._drains else None
            self.admission.version = version
            self._dispatch.add_version(version)
            self._start_groups()
            self._handle_due()
            self._observe()

    def take(self, count: int) -> Batch:
        assert count == self.admission.prompts_per_step
        with self._change:
            self._taking = True
            self._stall_timer.reset()  # engines that share the trainers' devices may have stopped since the last group
            self._observe()
            self._wait(self._has_batch)
            tried = self.admission.closed.popleft()
            self._taking, self._drained = False, None
            self._observe()
            waits = {**self._waiting.metrics(), **self._loading_metrics()}
        groups = accepted_groups(tried)
        drawn = self.sampler.metrics(item.group.number for item in tried)
        batch = Batch(groups, {**_metrics(tried, count), **drawn, **waits})
        tried_groups = [item.group for item in tried]
        notice = scoring_notice(
            tried_groups, "groups", "These groups were left out, and others sampled in their place."
        )
        if notice is not None:
            batch.notices.append(notice)
        if len(groups) < count:
            text = f"dynamic sampling found {len(groups)} of {count} groups with spread in {len(tried)} tries"
            if self.recipe.algorithm.dynamic_sampling.when_exhausted == "fail":
                raise RuntimeError(
                    f"{text}. The prompts may be too easy or too hard for the model: raise "
                    "algorithm.dynamic_sampling.max_attempts, set when_exhausted=smaller, or change the data."
                )
            batch.notices.append(f"{text}: this step trains on {len(groups)}")
        return batch

    def _has_batch(self) -> bool:
        if not self.admission.closed:
            self._arrivals.check_more_groups()
        return bool(self.admission.closed)

    def drain(self) -> None:
        if self._drains:
            with self._change:
                self._wait(self.admission.idle)

    def load_newest(self, version: int) -> None:
        if not self._finishes:
            return
        with self._change:
            self._stall_timer.reset()
            self._await_turn({"newest": version})
            self._dispatch.add_version(version)
            self._dispatch.finish_all()
            self._load_weights()
            self._handle_due()
            self._wait(lambda: not self._dispatch.behind)

    def close(self) -> None:
        with self._change:
            if self.admission.version == self.recipe.train.steps - 1:
                self._arrivals.ended()
            self.admission.version = None

    def state(self, *, interrupted: bool = False) -> dict[str, Any]:
        with self._change:
            if interrupted and self._drained is not None:
                return self._drained  # so that the resumed run samples the whole batch again, with the same numbers
            assert interrupted or self.admission.idle() or not self._drains, "drain first"
            version = self.admission.version
            if not self._arrivals.may_save(version):
                self._wait(lambda: self._arrivals.may_save(version))
            self._arrivals.saved(version)
            state = self._state()
            self._handle_due()
            return state

    def _state(self) -> dict[str, Any]:
        return {
            "segment": self._arrivals.segment,
            "counters": asdict(self.admission.state),
            "gathered": [list(self.admission.tried), *self.admission.closed],
            "waiting": self.admission.waiting(),
            "unfinished": self.admission.unfinished(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._interrupted = list(state.get("unfinished", []))
        with self._change:
            counters = AdmissionState(state["counters"]["admitted"], state["counters"]["closed"])
            self.admission.restore(counters, state["gathered"], state["waiting"], self._interrupted)

    def _await_turn(self, record: Record) -> None:
        """Wait until `record` is the next on a replayed tape, and write it. Without a replay: write it."""
        if not self._arrivals.may_take(record):
            self._wait(lambda: self._arrivals.may_take(record))
        self._arrivals.took(record)

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises an engine's error, or if a process has died or no group finishes within
        `rollout.timeout`."""
        began = time.monotonic()
        while not self._change.wait_for(lambda: self._error is not None or condition(), timeout=1.0):
            self._change.release()
            try:
                self.check_processes()
            finally:
                self._change.acquire()
            self._check_loads(began)
            if self.admission.running:
                waiting = self.admission.unfinished()
                self._stall_timer.check(len(waiting), f"number {waiting[0]}")
        if self._error is not None:
            raise self._error

    def _start_groups(self) -> None:
        """Start as many groups as admission and engines allow, with one message per engine."""
        if self._error is not None:
            return
        if not self.admission.running:
            self._stall_timer.reset()
        started = self._dispatch.start_again(len(self._interrupted))
        started += self._dispatch.start(self.admission.capacity)
        numbers = [*self._interrupted, *self.admission.start(len(started) - len(self._interrupted))]
        self.admission.restart(len(self._interrupted))
        self._interrupted = []
        submitted: dict[int, list[GenerationRequest]] = {}
        for number, engine in zip(numbers, started, strict=True):
            prompt = self.prompts[self.sampler.at(number)]
            seed = derived_seed(self.recipe.train.seed, number) if self._seeded else None
            request = GenerationRequest(number, prompt, self.sampling, seed, with_greedy=self._with_greedy)
            submitted.setdefault(engine, []).append(request)
        for engine, requests in sorted(submitted.items()):
            self.engines[engine].submit(requests).add_done_callback(self._fail_on_error)
            for request in requests:
                collected = self.engines[engine].collect(request.group)
                collected.add_done_callback(functools.partial(self._arrived, engine))
        self._load_weights()

    def _load_weights(self) -> None:
        """With finish: let engines without groups load the newest weights. Call with the lock."""
        for engine in self._dispatch.take_due_loads():
            self._loads[engine] = time.monotonic()
            self.engines[engine].load_weights().add_done_callback(functools.partial(self._loaded, engine))

    def _loaded(self, engine: int, result: Future[int]) -> None:
        """Note that an engine has loaded weights, in a thread of the transport."""
        try:
            version = result.result()
            with self._change:
                self._load_seconds += time.monotonic() - self._loads.pop(engine)
                self._arrivals.add_load(Loaded(engine, version))
                self._handle_due()
        except BaseException as error:  # noqa: BLE001 -- the controller raises it
            self._fail(error)

    def _check_loads(self, since: float) -> None:
        """Raise RuntimeError if an engine loads weights for longer than `rollout.start_timeout`, counted from `since` at the
        earliest: while the trainers train, an engine of a replay may wait for the update that it loads."""
        limit = self.recipe.rollout.start_timeout
        for engine, begin in self._loads.items():
            if (seconds := time.monotonic() - max(begin, since)) > limit:
                raise RuntimeError(
                    f"{self.engines[engine].name} has not loaded new weights from host memory within {seconds:.0f} s "
                    "(rollout.start_timeout); see its log in the run's logs/"
                )

    def _loading_metrics(self) -> dict[str, float]:
        if not self._finishes:
            return {}
        seconds, self._load_seconds = self._load_seconds, 0.0
        return {"rollout/engines_behind": float(self._dispatch.behind), "rollout/load_seconds": seconds}

    def _fail_on_error(self, result: Future[Any]) -> None:
        error = result.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._change:
            self._error = self._error or error
            self._change.notify_all()

    def _arrived(self, engine: int, result: Future[tuple[Any, DataRef]]) -> None:
        """Handle a collected group, in a thread of the transport. The controller raises its errors when it waits."""
        try:
            group = attach(result.result())
            settings = self.recipe.algorithm
            add_overlong_penalty(group, settings.overlong, self.recipe.rollout.max_response_length)
            dynamic = settings.dynamic_sampling
            keep = not group.failures and (not dynamic.enabled or has_spread(group.samples, dynamic.metric))
            if not keep:  # free the vectors; the metrics still need the control data
                attach((group, InlineData([])))
            with self._change:
                self._stall_timer.reset()
                self._arrivals.add(group, Arrival(engine, keep))
                self._handle_due()
        except BaseException as error:  # noqa: BLE001 -- the controller raises it
            self._fail(error)

    def _handle_due(self) -> None:
        """Handle arrived groups and loaded weights whose turn it is. Call with the lock."""
        for due in self._arrivals.due():
            if isinstance(due, Loaded):
                self._dispatch.loaded(due.engine, due.version)
            else:
                group, arrival = due
                self._dispatch.remove(arrival.engine)
                self._failed_share.add(group)
                self.admission.finish(group, arrival.accepted)
                self._observe(group.scoring_seconds + group.judge_seconds)
            self._start_groups()
        self._observe()
        self._change.notify_all()

    def _observe(self, scoring: float = 0.0) -> None:
        """Note who waits now. Call with the lock, after a change. scoring: seconds, of the group that has just arrived."""
        reason: Reason | None = None
        if self._taking and not self.admission.closed:
            reason = "window" if self.admission.has_enough_finished() else "engines"
        self._waiting.observe(self._dispatch.idle, reason, scoring)


def _metrics(tried: list[TriedGroup], count: int) -> dict[str, float]:
    """Return the rollout metrics of a batch, over all tried groups (filtered groups included)."""
    samples = [sample for item in tried for sample in item.group.samples]
    greedy = [item.group.greedy for item in tried if item.group.greedy is not None]
    rewards = [sample.reward for sample in samples if not math.isnan(sample.reward)]
    waits = [item.group.judge_seconds for item in tried if item.group.judge_seconds]
    accepted, unscored = len(accepted_groups(tried)), sum(bool(item.group.failures) for item in tried)
    return {
        "rollout/prompts_tried": float(len(tried)),
        "rollout/groups_filtered": float(len(tried) - accepted - unscored),
        "rollout/groups_missing": float(count - accepted),
        "rollout/groups_unscored": float(unscored),
        **scoring_counts([item.group for item in tried], "rollout"),
        **({"rollout/judge_seconds": float(np.mean(waits))} if waits else {}),
        **({"rollout/rewards/mean": float(np.mean(rewards))} if rewards else {}),
        "rollout/truncated": float(np.mean([sample.truncated for sample in samples])),
        "rollout/total_num_tokens": float(sum(sample.length for sample in [*samples, *greedy])),
        **agent_figures(samples),
        **sampled_figures(tried),
    }
