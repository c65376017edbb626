"""The source of RL batches: submit groups to engines, and filter them (dynamic sampling).

The death of an engine is an error, unless a fleet (`rollout.min_engines`) gives its groups to others.

Background threads receive the groups, so sampling continues while the controller trains.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from megarl.algorithms.shaping import add_overlong_penalty, has_spread
from megarl.cluster.calls import StallTimer, attach
from megarl.cluster.outage_watch import OutageWatch
from megarl.data.prompts import PromptDataset
from megarl.engines.tape import Record
from megarl.recipe.derived.at_update import is_continuous, update_rule, window_groups
from megarl.recipe.schema import Recipe
from megarl.rollout.admission import Admission, AdmissionState, lost_among
from megarl.rollout.begun_groups import BegunGroups, cannot_continue_groups, copy_in_time, copy_partials
from megarl.rollout.dispatch import Dispatch, Finishing
from megarl.rollout.engine_handle import SamplingEngine
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.fleet.moves import GroupMoves
from megarl.rollout.metrics import batch_of, unused_metrics
from megarl.rollout.requests import Requests
from megarl.rollout.source import Batch
from megarl.rollout.tape import Arrival, Arrivals, Loaded
from megarl.rollout.unscored_groups import FailedShare
from megarl.rollout.waiting import Reason, Waiting
from megarl.rollout.weight_loads import WeightLoads
from megarl.types import DataRef, GenerationRequest, InlineData, Partial

logger = logging.getLogger(__name__)


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
        fleet: Fleet | None = None,
        outages: OutageWatch | None = None,
    ):
        """`check_processes` is called every second while waiting; it raises if a process of the run has died. `arrivals`: order in
        which groups are handled; None: as they arrive, without a tape. `fleet`: of engines that may die; None: none may. `outages`:
        of services; None: the caller does not watch them."""
        self.recipe, self.engines, self.fleet, self.outages = recipe, engines, fleet, outages
        self.check_processes = check_processes
        self.requests = Requests(recipe, prompts, stop_token_ids)
        self.sampler = self.requests.sampler
        rollout, dynamic = recipe.rollout, recipe.algorithm.dynamic_sampling
        self.admission = Admission(
            recipe.data.prompts_per_step,
            rollout.max_staleness,
            dynamic.max_attempts if dynamic.enabled else None,
            is_continuous(recipe),
            batches=recipe.train.steps,
            window=window_groups(recipe),
            oversample=dynamic.oversample if dynamic.enabled else 1.0,
            drains=update_rule(recipe) == "drain",
        )
        self._failed_share = FailedShare(recipe.reward.max_failed_share, recipe.data.prompts_per_step)
        self._change = threading.Condition()
        self._error: BaseException | None = None
        most_groups = math.ceil(self.admission.oversample * recipe.data.prompts_per_step)
        finishing = Finishing.of(update_rule(recipe), rollout.max_staleness, most_groups)
        self._dispatch = Dispatch(len(self.engines), finishing)
        self._waiting = Waiting(len(self.engines))
        self._taking = False  # the trainers wait for a batch
        self._closed = False  # the tape has ended: groups that still run are left out
        self._arrivals: Arrivals[Arrival] = arrivals or Arrivals()
        advice = self._arrivals.stall_advice
        self._stall_timer = StallTimer(rollout.timeout, advice, lambda: outages is not None and outages.is_down)
        self._drains, self._finishes = update_rule(recipe) == "drain", finishing is not None
        self._loads = WeightLoads(self.engines, rollout.start_timeout)
        self._unfinished: list[int] = []  # groups that ran when the resumed checkpoint was saved
        self._drained: dict[str, Any] | None = None  # with drain: the state before the groups of the next batch started
        self._cannot_continue = cannot_continue_groups(recipe)
        self._begun = BegunGroups(self._cannot_continue)
        parts = engines, fleet, self.admission, self._dispatch, self._begun, self.requests, self._change
        self.moves = GroupMoves(
            *parts,
            self._start_again,
            self._fail,
            cannot_continue=self._cannot_continue,
            finishes_first=self._drains,
        )
        self._owners = self.moves.owners

    def admit(self, version: int) -> None:
        with self._change:
            self._stall_timer.reset()
            if self.admission.version is None:
                self._waiting.metrics()  # engines do not wait while the run starts
            self._await_turn({"version": version})
            self._drained = self._state({}) if self._drains else None
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
            loads = self._loads.take_metrics(self._dispatch.behind) if self._finishes else {}
            parts = [each.take_metrics() for each in (self._begun, self.fleet, self.outages) if each is not None]
            if self.admission.oversample > 1.0:
                parts.append(unused_metrics(self.admission.take_unused()))
            waits = {name: value for part in (self._waiting.metrics(), loads, *parts) for name, value in part.items()}
            notice = self._begun.take_notice()
        drawn = self.sampler.metrics(item.group.number for item in tried)
        return batch_of(tried, count, self.recipe.algorithm.dynamic_sampling, {**drawn, **waits}, notice)

    def _has_batch(self) -> bool:
        if not self.admission.closed:
            self._arrivals.check_more_groups()
        return bool(self.admission.closed) and not self._awaits_surplus()

    def _awaits_surplus(self) -> bool:
        """Return whether surplus groups must end before a complete batch: engines on the trainers' devices sleep during the update."""
        return self.admission.max_staleness == 0 and self.admission.running > 0

    def drain(self) -> None:
        """See `SampleSource`. Engines that hand groups over have replied when this returns: updates must not change their weights
        meanwhile."""
        with self._change:
            self._wait(lambda: not self._owners.moving and (not self._drains or self.admission.idle()))
        self.moves.release_engines(before_update=True)

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
            self.admission.version, self._closed = None, True

    def state(self, *, interrupted: bool = False) -> dict[str, Any]:
        partials = self._copy_partials(interrupted)
        with self._change:
            if interrupted and self._drained is not None and not lost_among(self._drained["gathered"]):
                return self._drained  # so that the resumed run samples the whole batch again, with the same numbers
            if interrupted and self._drains and self.admission.running:
                text = "%d groups are sampled again after a resume, with newer weights: metrics will differ from an unstopped run's"
                logger.warning(text, self.admission.running)
            assert interrupted or self.admission.idle() or not self._drains, "drain first"
            version = self.admission.version
            if not self._arrivals.may_save(version):
                self._wait(lambda: self._arrivals.may_save(version))
            self._arrivals.saved(version)
            state = self._state(partials)
            self._handle_due()
            return state

    def _state(self, partials: Mapping[int, tuple[Partial, ...]]) -> dict[str, Any]:
        unfinished = self.admission.unfinished()
        begun = {number: self.requests.begun(number, partials[number]) for number in unfinished if number in partials}
        return {
            "segment": self._arrivals.segment,
            "counters": asdict(self.admission.state),
            "gathered": [list(self.admission.tried), *self.admission.closed],
            "waiting": self.admission.waiting(),
            "unfinished": unfinished,
            "begun": begun,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._unfinished = list(state.get("unfinished", []))
        self._begun.restore(state.get("begun", {}))
        with self._change:
            counters = AdmissionState(state["counters"]["admitted"], state["counters"]["closed"])
            self.admission.restore(counters, state["gathered"], state["waiting"], self._unfinished)

    def _await_turn(self, record: Record) -> None:
        """Wait until `record` is the next on a replayed tape, and write it. Without a replay: write it."""
        if not self._is_turn(record):
            self._wait(lambda: self._is_turn(record))
        self._arrivals.took(record)

    def _is_turn(self, record: Record) -> bool:
        """Return whether `record` is the next on a replayed tape. `may_take` drops the records of saves that the replay leaves out, so
        groups recorded after such a save are handled first."""
        if self._arrivals.may_take(record):
            return True
        self._handle_due()
        return self._arrivals.may_take(record)

    def _copy_partials(self, interrupted: bool) -> dict[int, tuple[Partial, ...]]:
        """Return the samples so far of each group, for `state`.

        Groups arrive and start meanwhile: `state` leaves out the first, and the others have no tokens. So
        a replay, which repeats both orders, saves the same tokens.
        """
        version = self.admission.version
        if self._drains or self._cannot_continue is not None or version is None:
            return {}
        if interrupted:
            return copy_in_time(self.engines, version, self.fleet)
        return copy_partials(self.engines, version, functools.partial(self._check, time.monotonic()), self.fleet)

    def _check(self, since: float) -> None:
        """Raise an engine's error, or if a process has died or no group finishes within `rollout.timeout`. since: see
        `WeightLoads.check`."""
        self.check_processes()
        with self._change:
            self._raise_error()
            self._check_progress(since)

    def _raise_error(self) -> None:
        """Raise an engine's error, if any; with a fleet, the error of a check of the processes first, which names all dead engines.
        Call with the lock."""
        if self._error is None:
            return
        if self.fleet is not None:
            self._check_unlocked()
        raise self._error

    def _check_unlocked(self) -> None:
        self._change.release()
        try:
            self.check_processes()
        finally:
            self._change.acquire()

    def _check_progress(self, since: float) -> None:
        self._loads.check(since)
        if self.admission.running:
            waiting = self.admission.unfinished()
            self._stall_timer.check(len(waiting), f"number {waiting[0]}")

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises an engine's error, or if a process has died or no group finishes within
        `rollout.timeout`."""
        began = time.monotonic()
        while not self._change.wait_for(lambda: self._error is not None or condition(), timeout=1.0):
            self._check_unlocked()
            self._check_progress(began)
        self._raise_error()

    def _start_again(self) -> None:
        """Start groups that their engines have lost. Call with the lock."""
        self._stall_timer.reset()
        self._start_groups()
        self._observe()

    def _start_groups(self) -> None:
        """Start as many groups as admission and engines allow, with one message per engine; none after `close`, whose tape has ended."""
        if self._closed or self._error is not None or (self.fleet is not None and not self.fleet.serving):
            return
        if not self.admission.running:
            self._stall_timer.reset()
        if self.fleet is not None:
            self._dispatch.open_only(self.fleet.serving)
            for engine in self.fleet.take_restarted():
                self._arrivals.died(engine)
        again = [*self._unfinished, *self._owners.take_lost()]
        started = self._dispatch.start_again(len(again))
        started += self._dispatch.start(self.admission.capacity)
        numbers = [*again, *self.admission.start(len(started) - len(again))]
        self.admission.restart(len(self._unfinished))
        self._unfinished = []
        requests = [self._begun.continued(self.requests.of(number)) for number in numbers]
        self._submit(zip(requests, started, strict=True))
        self._load_weights()
        if self._owners.lost:  # an engine died meanwhile
            self._start_groups()

    def _submit(self, requests: Iterable[tuple[GenerationRequest, int]]) -> None:
        """Send requests to their engines, with one message per engine. Call with the lock."""
        by_engine: dict[int, list[GenerationRequest]] = {}
        for request, engine in requests:
            by_engine.setdefault(engine, []).append(request)
        for engine, of_engine in sorted(by_engine.items()):
            with self.fleet.lock if self.fleet is not None else contextlib.nullcontext():
                if self.fleet is not None and engine not in self.fleet.serving:  # it has just died
                    for request in of_engine:
                        self.moves.give_up(request.group, engine)
                    continue
                process = self.moves.process(engine)
                self._owners.give([request.group for request in of_engine], (engine, process))
                self.engines[engine].submit(of_engine).add_done_callback(
                    functools.partial(self._submitted, engine, process)
                )
                for request in of_engine:
                    collected = self.engines[engine].collect(request.group)
                    collected.add_done_callback(functools.partial(self._arrived, engine, process, request.group))

    def _load_weights(self) -> None:
        """With finish: let engines without groups load the newest weights. Call with the lock."""
        for engine in self._dispatch.take_due_loads():
            self._loads.begin(engine)
            self.engines[engine].load_weights().add_done_callback(functools.partial(self._loaded, engine))

    def _loaded(self, engine: int, result: Future[int]) -> None:
        """Note that an engine has loaded weights, in a thread of the transport."""
        try:
            version = result.result()
            with self._change:
                self._loads.end(engine)
                if not self._closed:
                    self._arrivals.add_load(Loaded(engine, version))
                    self._handle_due()
        except BaseException as error:  # noqa: BLE001 -- the controller raises it
            self._fail(error)

    def _submitted(self, engine: int, process: int, result: Future[None]) -> None:
        error = result.exception()
        if error is not None and self.moves.has_failed(engine, process, error):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._change:
            self._error = self._error or error
            self._change.notify_all()

    def _arrived(self, engine: int, process: int, number: int, result: Future[tuple[Any, DataRef]]) -> None:
        """Handle a collected group, in a thread of the transport. The controller raises its errors when it waits."""
        try:
            if self.moves.has_moved(engine, process, number, result.exception()):
                return
            group = attach(result.result())
            settings = self.recipe.algorithm
            add_overlong_penalty(group, settings.overlong, self.recipe.rollout.max_response_length)
            dynamic = settings.dynamic_sampling
            keep = not group.failures and (not dynamic.enabled or has_spread(group.samples, dynamic.metric))
            if not keep:  # free the vectors; the metrics still need the control data
                attach((group, InlineData([])))
            with self._change:
                if self._closed or not self._owners.owns(number, (engine, process)):  # its engine has just left
                    return
                self._stall_timer.reset()
                self._owners.arrive(number)
                self._arrivals.add(group, Arrival(engine, keep))
                self._handle_due()
        except BaseException as error:  # noqa: BLE001 -- the controller raises it
            self._fail(error)

    def _handle_due(self) -> None:
        """Handle the arrived groups and loaded weights that are due. Call with the lock."""
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
        if self._taking and (not self.admission.closed or self._awaits_surplus()):
            has_groups = not self.admission.closed and self.admission.has_enough_finished()
            reason = "window" if has_groups else "engines"
        self._waiting.observe(self._dispatch.idle, reason, scoring, self._dispatch.open)
