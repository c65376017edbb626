"""The source of RL batches: submit groups to engines, filter them (dynamic sampling), and fail if an engine dies.

Background threads receive the groups, so sampling continues while the controller trains.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.shaping import add_overlong_penalty, has_spread
from megarl.cluster.calls import StallTimer, attach, wait
from megarl.data.dataset import sampler_of
from megarl.data.prompts import PromptDataset
from megarl.recipe.derived.at_update import is_continuous, update_rule, window_groups
from megarl.recipe.derived.seeded import samples_are_seeded
from megarl.recipe.schema import Recipe
from megarl.rollout.admission import Admission, AdmissionState, accepted_groups
from megarl.rollout.begun_groups import BegunGroup, BegunGroups, cannot_continue_groups, request_checksum
from megarl.rollout.dispatch import Dispatch, Finishing
from megarl.rollout.engine_handle import SamplingEngine
from megarl.rollout.metrics import batch_metrics
from megarl.rollout.source import Batch
from megarl.rollout.tape import Arrivals
from megarl.rollout.unscored_groups import FailedShare, scoring_notice
from megarl.rollout.waiting import Reason, Waiting
from megarl.types import DataRef, GenerationRequest, InlineData, Partial, Sampling, derived_seed


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
        self._cannot_continue = cannot_continue_groups(recipe)
        self._begun = BegunGroups(self._cannot_continue)
        self._engine_of: dict[int, int] = {}  # of each group that has not arrived
        self._moving: dict[int, dict[int, BaseException]] = {}  # engines that hand groups over -> errors of groups

    def admit(self, version: int) -> None:
        with self._change:
            self._stall_timer.reset()
            if not self._arrivals.may_take_version(version):
                self._wait(lambda: self._arrivals.may_take_version(version))
            self._arrivals.took_version(version)
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
            self._taking = False
            self._observe()
            waits = {**self._waiting.metrics(), **self._loading_metrics(), **self._begun.take_metrics()}
            notices = [self._begun.take_notice()]
        groups = accepted_groups(tried)
        drawn = self.sampler.metrics(item.group.number for item in tried)
        batch = Batch(groups, {**batch_metrics(tried, count), **drawn, **waits})
        tried_groups = [item.group for item in tried]
        notices.append(
            scoring_notice(tried_groups, "groups", "These groups were left out, and others sampled in their place.")
        )
        batch.notices += [notice for notice in notices if notice is not None]
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
            self._dispatch.add_version(version)
            self._dispatch.finish_all()
            self._load_weights()
            self._wait(lambda: not self._dispatch.behind)

    def close(self) -> None:
        with self._change:
            if self.admission.version == self.recipe.train.steps - 1:
                self._arrivals.ended()
            self.admission.version = None

    def state(self) -> dict[str, Any]:
        partials = self._copy_partials()
        with self._change:
            assert self.admission.idle() or not self._drains, "drain first"
            version = self.admission.version
            if not self._arrivals.may_save(version):
                self._wait(lambda: self._arrivals.may_save(version))
            self._arrivals.saved(version)
            unfinished = self.admission.unfinished()
            begun = {
                number: BegunGroup(request_checksum(self._request(number)), partials[number])
                for number in unfinished
                if number in partials
            }
            state = {
                "segment": self._arrivals.segment,
                "counters": asdict(self.admission.state),
                "gathered": [list(self.admission.tried), *self.admission.closed],
                "waiting": self.admission.waiting(),
                "unfinished": unfinished,
                "begun": begun,
            }
            self._handle_due()
            return state

    def restore(self, state: dict[str, Any]) -> None:
        self._interrupted = list(state.get("unfinished", []))
        self._begun.restore(state.get("begun", {}))
        with self._change:
            counters = AdmissionState(state["counters"]["admitted"], state["counters"]["closed"])
            self.admission.restore(counters, state["gathered"], state["waiting"], self._interrupted)

    def _copy_partials(self) -> dict[int, tuple[Partial, ...]]:
        """Return the samples so far of each group, for `state`.

        Groups arrive and start meanwhile: `state` leaves out the first, and the others have no tokens. So
        a replay, which repeats both orders, saves the same tokens.
        """
        version = self.admission.version
        if self._drains or self._cannot_continue is not None or version is None:
            return {}
        calls = [engine.copy_partials(version) for engine in self.engines]
        copies = [wait(call, self._check) for call in calls]
        return {
            number: partials
            for copied in copies
            for number, partials in copied.items()
            if any(len(partial.tokens) for partial in partials)
        }

    def move_groups(self, engine: int) -> list[int]:
        """Move the groups that an engine samples to the other engines, which continue them, and start no further group on it.

        Returns the groups' numbers. A group that is already scored stays, and arrives. Engines must have the same weights:
        call from the thread that publishes weights. Raises RuntimeError if samples cannot be continued.
        """
        if self._cannot_continue is not None:
            raise RuntimeError(f"groups cannot move to other engines: {self._cannot_continue}")
        with self._change:
            self._dispatch.close(engine)
            numbers = sorted(number for number, sampling in self._engine_of.items() if sampling == engine)
            self._moving[engine] = {}
        handed = wait(self.engines[engine].hand_over(numbers), self._check)
        with self._change:
            for number, error in self._moving.pop(engine).items():
                if number not in handed:
                    raise error
            for _ in handed:
                self._dispatch.remove(engine)
            moved = [self._begun.with_partials(self._request(number), handed[number]) for number in sorted(handed)]
            self._submit(zip(moved, self._dispatch.start_again(len(moved)), strict=True))
            self._observe()
        return sorted(handed)

    def _check(self) -> None:
        """Raise an engine's error, or if a process has died or no group finishes within `rollout.timeout`."""
        self.check_processes()
        with self._change:
            if self._error is not None:
                raise self._error
            self._check_progress()

    def _check_progress(self) -> None:
        self._check_loads()
        if self.admission.running:
            waiting = self.admission.unfinished()
            self._stall_timer.check(len(waiting), f"number {waiting[0]}")

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises an engine's error, or if a process has died or no group finishes within
        `rollout.timeout`."""
        while not self._change.wait_for(lambda: self._error is not None or condition(), timeout=1.0):
            self._change.release()
            try:
                self.check_processes()
            finally:
                self._change.acquire()
            self._check_progress()
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
        requests = [self._begun.continued(self._request(number)) for number in numbers]
        self._submit(zip(requests, started, strict=True))
        self._load_weights()

    def _request(self, number: int) -> GenerationRequest:
        """Return the request of a group: a function of its number and the recipe."""
        prompt = self.prompts[self.sampler.at(number)]
        seed = derived_seed(self.recipe.train.seed, number) if self._seeded else None
        return GenerationRequest(number, prompt, self.sampling, seed, with_greedy=self._with_greedy)

    def _submit(self, requests: Iterable[tuple[GenerationRequest, int]]) -> None:
        """Send requests to their engines, with one message per engine. Call with the lock."""
        by_engine: dict[int, list[GenerationRequest]] = {}
        for request, engine in requests:
            by_engine.setdefault(engine, []).append(request)
            self._engine_of[request.group] = engine
        for engine, of_engine in sorted(by_engine.items()):
            self.engines[engine].submit(of_engine).add_done_callback(self._fail_on_error)
            for request in of_engine:
                collected = self.engines[engine].collect(request.group)
                collected.add_done_callback(functools.partial(self._arrived, engine, request.group))

    def _load_weights(self) -> None:
        """With finish: let engines without groups load the newest weights. Call with the lock."""
        for engine in self._dispatch.take_due_loads():
            self._loads[engine] = time.monotonic()
            self.engines[engine].load_weights().add_done_callback(functools.partial(self._loaded, engine))

    def _loaded(self, engine: int, result: Future[int]) -> None:
        """Start groups on an engine that has loaded weights, in a thread of the transport."""
        try:
            version = result.result()
            with self._change:
                self._load_seconds += time.monotonic() - self._loads.pop(engine)
                self._dispatch.loaded(engine, version)
                self._start_groups()
                self._observe()
                self._change.notify_all()
        except BaseException as error:  # noqa: BLE001 -- the controller raises it
            self._fail(error)

    def _check_loads(self) -> None:
        """Raise RuntimeError if an engine loads weights for longer than `rollout.start_timeout`."""
        limit = self.recipe.rollout.start_timeout
        for engine, begin in self._loads.items():
            if (seconds := time.monotonic() - begin) > limit:
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

    def _arrived(self, engine: int, number: int, result: Future[tuple[Any, DataRef]]) -> None:
        """Handle a collected group, in a thread of the transport. The controller raises its errors when it waits."""
        try:
            if self._has_moved(engine, number, result.exception()):
                return
            group = attach(result.result())
            settings = self.recipe.algorithm
            add_overlong_penalty(group, settings.overlong, self.recipe.rollout.max_response_length)
            dynamic = settings.dynamic_sampling
            keep = not group.failures and (not dynamic.enabled or has_spread(group.samples, dynamic.metric))
            if not keep:  # free the vectors; the metrics still need the control data
                attach((group, InlineData([])))
            with self._change:
                self._stall_timer.reset()
                del self._engine_of[number]
                self._arrivals.add(group, Arrival(engine, keep))
                self._handle_due()
        except BaseException as error:  # noqa: BLE001 -- the controller raises it
            self._fail(error)

    def _has_moved(self, engine: int, number: int, error: BaseException | None) -> bool:
        """Return whether `error` may mean that the group has moved to another engine. `move_groups` decides when it knows."""
        with self._change:
            if error is not None and engine in self._moving:
                self._moving[engine][number] = error
                return True
            return self._engine_of.get(number) != engine

    def _handle_due(self) -> None:
        """Handle arrived groups whose turn it is. Call with the lock."""
        for group, arrival in self._arrivals.due():
            self._dispatch.remove(arrival.engine)
            self._failed_share.add(group)
            self.admission.finish(group, arrival.accepted)
            self._start_groups()
        self._observe()
        self._change.notify_all()

    def _observe(self) -> None:
        """Note who waits now. Call with the lock, after a change."""
        reason: Reason | None = None
        if self._taking and not self.admission.closed:
            reason = "window" if self.admission.has_enough_finished() else "engines"
        self._waiting.observe(self._dispatch.idle, reason)
