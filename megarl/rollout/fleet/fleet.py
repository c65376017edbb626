"""The fleet: which engines sample, restart, and wait for weights. See `megarl.rollout.fleet.states`.

If an engine dies in an update, the others may have parts of the new weights: all are ended and restart, and the update is
repeated.

The wanted number of engines may change (`megarl.rollout.fleet.changing`): further ones start and join at an update, and others
leave. The source of the samples moves the groups of an engine that leaves, and then calls `release`.

Transport threads report failed calls; the controller's thread polls, restarts and updates. The lock is never held while a process
is ended, since its calls then fail in transport threads that need the lock.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from megarl.cluster.failures import (
    ClusterError,
    Failure,
    MachineLost,
    ServiceDied,
    TooFewEngines,
)
from megarl.engines.base import engine_name
from megarl.errors import ProcessFailure, pluralize
from megarl.recipe.observe import Event
from megarl.rollout.engine_handle import EngineHandle, failed_in, is_death, load_group
from megarl.rollout.fleet.changing import ChangingFleet
from megarl.rollout.fleet.groups import EngineGroups
from megarl.rollout.fleet.states import MACHINE_SECONDS, Member
from megarl.rollout.fleet.step_watch import StepWatch
from megarl.weight_sync.session import WeightSyncError

DEATH_SECONDS = (
    30.0  # time after an aborted update in which a death must show (a stopped process: 20 s); else it is an error
)
TOGETHER_SECONDS = 0.6  # after a death, before a restart: engines that die together are reported one after another
_POLL_SECONDS = 0.2
# Causes of an engine that ends because the update does. With tensor parallelism vLLM names the error of a worker by its message alone.
_OF_THE_UPDATE = re.compile(r"WeightSyncError:|EngineRefused:|.*weight sync (was aborted|has ended)", re.DOTALL)


class Fleet(ChangingFleet):
    """The engines of a run with `rollout.min_engines`."""

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        descriptions: Sequence[dict[str, Any]],
        min_engines: int,
        restart: Callable[[int], None],
        notice: Callable[[str, Event | None], None],
        end: Callable[[int], None],
        load_limit: float = math.inf,
        step_limit: float = 0.0,
        together: float = TOGETHER_SECONDS,
        group_size: int = 1,
    ) -> None:
        """descriptions: results of the engines' `start`. min_engines: `rollout.min_engines`. restart: kills an engine's
        process if it still runs, and starts a new one behind its handle; it appends the handle of an additional engine to `engines`.
        notice: receives messages for the user, with their event. end: ends the process of an engine that leaves, and frees its
        devices. load_limit: seconds after which a new process that has not loaded counts as dead. step_limit: see `StepWatch`.
        together: seconds after a death in which `poll` looks for other deaths before it restarts an engine. group_size:
        `rollout.data_parallel`; the engines of a group end and restart together."""
        super().__init__(engines, descriptions, min_engines, notice, end, EngineGroups(group_size))
        self._restart = restart
        self._load_limit, self._load_began = load_limit, dict[int, float]()
        self._steps = StepWatch(step_limit, load_limit)
        self._loading: dict[int, Future[dict[str, Any]]] = {}
        self._no_machine_until: dict[int, float] = {}  # by engine: time of the next attempt to start it
        self._last_death: Failure | None = None
        self._together, self._deaths_seen = together, 0  # by `poll`
        self._in_update = False
        self._updating: set[Member] = set()  # engines that take part in the update that runs
        self._interrupted = False  # one of them has failed, and no engine samples until the update is repeated
        self._failed: set[Member] = set()  # engines that failed in the update
        for engine in range(len(self.engines)):
            self._watch(engine)

    # --- called by transport threads and the controller's thread -------------------------------------------------------

    def process(self, engine: int) -> int:
        """Return the number of an engine's process, for `lost`."""
        with self.lock:
            return self._states.process(engine)

    def lost(self, engine: int, process: int, error: BaseException) -> bool:
        """Return whether a call failed because its engine has died or was ended, and the run goes on.

        process: number of the engine's process when the call began.
        """
        if not failed_in(error, engine_name(engine)):
            return False
        with self.lock:
            if process != self._states.process(engine) or self._states.is_dead(engine):
                return self._keeps_enough()
            if self.engines[engine].service.stopping:
                return False  # the run ends
            if not is_death(error):
                return False
            if self._is_updating(engine) and not isinstance(error, ServiceDied):
                self._interrupted = True  # an engine ends when its update is aborted; `restart_all` decides
                return True
            self._die(engine, error.failure)
            return self._keeps_enough()

    @property
    def serving(self) -> list[int]:
        """Engines that may receive groups."""
        with self.lock:
            return [] if self._interrupted else self._sampling

    @property
    def in_update(self) -> bool:
        """True while an update of the weights runs."""
        with self.lock:
            return self._in_update

    # --- called by the controller's thread -----------------------------------------------------------------------------

    def poll(self) -> None:
        """Find dead engines, restart them and print messages. Call it about every second.

        Raises TooFewEngines if fewer than `rollout.min_engines` are left.
        """
        self._find_deaths_together()
        self._find_hangs()
        with self.lock:
            self._read_loads()
            ended = self._end_broken_groups()
            self._keeps_enough()  # before dead engines leave in place of live ones
            for engine in [] if self._in_update else self._change_number():  # these leave
                self._no_machine_until.pop(engine, None)
                self._loading.pop(engine, None)
            waiting = [engine for engine, until in self._no_machine_until.items() if time.monotonic() < until]
            restartable = self._groups.whole(self._states.due)
            due = [engine for engine in restartable if not {*self._groups.of(engine)} & {*waiting}]
            is_enough = self._keeps_enough()
            remaining = len(restartable) + len(self._states.starting) + len(self._members) - len(self._states.leaving)
            too_few = not is_enough or remaining < self.least
            without_process = [engine for engine in range(self._states.count) if self._states.is_dead(engine)]
            for engine in [] if too_few else due:
                self._states.restart(engine)
                if not {*self._groups.of(engine)} & self._no_machine_until.keys():
                    verb = "restarts" if self._states.process(engine) else "starts"
                    self._add_message(f"{engine_name(engine)} {verb}", None)
        self._print()
        self._end_removed()
        for engine in ended if too_few else {*ended} - {*due}:  # a restart ends the others
            self.engines[engine].stop()
        if too_few:
            assert self._last_death is not None
            names = ", ".join(engine_name(engine) for engine in without_process) or "none"
            text = f"\nFewer than rollout.min_engines = {self.least} engines are left. Without a process: {names}."
            raise TooFewEngines(self._last_death, text)
        for group in self._groups.split(due):
            self._start_again(group)

    def members(self) -> list[Member]:
        """Return the engines that take part in the update that begins now, or in the next one."""
        with self.lock:
            self._updating = set(self._members)
            return self._members

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Mark a block as an update of the weights, which is repeated until it succeeds."""
        with self.lock:
            self._in_update, self._updating = True, set(self._members)
        yield
        with self.lock:  # not after an error: the run ends, or trainers start again and repeat the update
            self._in_update = self._interrupted = False

    def follow_update(self, member: Member, update: Future[Any]) -> None:
        """Record an engine that fails in an update or its preparation, unless the error is the abort of the whole update."""

        def ended(update: Future[Any]) -> None:
            error = update.exception()
            if isinstance(error, ClusterError) and not _OF_THE_UPDATE.match(error.failure.cause):
                with self.lock:
                    self._failed.add(member)

        update.add_done_callback(ended)

    def updated(self, members: Sequence[Member]) -> None:
        """Record that `members` have the newest weights: loaded engines sample from now on."""
        with self.lock:
            for engine in self._states.update(members):
                self._add_message(f"{engine_name(engine)} has the run's weights, and samples", None)

    def restart_all(self, members: Sequence[Member], error: Exception, check: Callable[[], None], limit: float) -> None:
        """End and restart all `members` of an update that `error` has aborted, and return when they have loaded.

        check: of the run's processes. Raises `error` if none of the members has died or failed, and as `end_and_restart` does.
        """
        names = {f"service {engine_name(engine)}" for engine, _ in members}
        by_member = isinstance(error, ClusterError) and error.failure.place.name in names
        if isinstance(error, TooFewEngines) or not (isinstance(error, WeightSyncError) or by_member):
            raise error
        deadline = time.monotonic() + DEATH_SECONDS
        while not self._find_failed(members):
            if time.monotonic() > deadline:
                raise error
            check()
            time.sleep(_POLL_SECONDS)
        self.end_and_restart(members, str(error), check, limit)

    def end_and_restart(self, members: Sequence[Member], cause: str, check: Callable[[], None], limit: float) -> None:
        """End and restart `members`, some of which may have parts of an aborted update, and return when they have loaded.

        cause: of the abort, for the message. Raises ProcessFailure after `limit` seconds without `rollout.min_engines` loaded
        engines; and as `poll` does.
        """
        with self.lock:
            self._interrupted = True
            for engine, process in members:
                if engine in self._states.leaving:
                    self._remove(engine)
                elif process == self._states.process(engine) and not self._states.is_dead(engine):
                    self._states.end(engine)
            text = f"the update of the weights was aborted ({cause}): all engines restart, and it is repeated"
            self._add_message(text, None)
        deadline = time.monotonic() + limit
        self.poll()
        while self._are_starting(members) or self._count_members() < self.least:
            if time.monotonic() > deadline:
                if self._count_members() >= self.least:
                    return
                raise ProcessFailure(
                    f"the engines have not restarted within rollout.start_timeout = {limit:g} s ({cause})"
                )
            time.sleep(_POLL_SECONDS)
            check()
            self.poll()

    # --- inside ----------------------------------------------------------------------------------------------------------

    @property
    def _sampling(self) -> list[int]:
        return self._groups.whole(self._states.serving)

    @property
    def _members(self) -> list[Member]:
        members = dict(self._states.members)
        return [(engine, members[engine]) for engine in self._groups.whole(members.keys())]

    def _end_broken_groups(self) -> list[int]:
        """End the living engines of groups with a dead one, for which they would wait in each step. Returns them."""
        all_ended: list[int] = []
        for group in self._groups.split(range(self._states.count)):
            dead = [engine for engine in group if self._states.is_dead(engine)]
            ended = [engine for engine in group if engine not in dead] if dead else []
            for engine in ended:
                self._states.end(engine)
                self._loading.pop(engine, None)
                self._add_message(f"{engine_name(engine)} ends with {engine_name(dead[0])}, of the same group", None)
            all_ended += ended
        return all_ended

    def _start_again(self, group: Sequence[int]) -> None:
        """Start new processes of a group's engines, or wait if a machine has left the cluster and no other one has devices."""
        engine = group[0]
        try:
            for engine in group:
                if engine > len(self.engines):
                    raise MachineLost("another engine waits, too")
                self._restart(engine)
        except MachineLost as error:
            with self.lock:
                for each in group:
                    self._states.wait_for_machine(each)
                if engine not in self._no_machine_until:
                    self._add_message(f"{engine_name(engine)} waits for a machine: {error}", "warning")
                self._no_machine_until[engine] = time.monotonic() + MACHINE_SECONDS
            return
        loads = load_group([self.engines[engine] for engine in group])
        with self.lock:
            for engine, loading in zip(group, loads, strict=True):
                self._no_machine_until.pop(engine, None)
                self._loading[engine], self._load_began[engine] = loading, time.monotonic()

    def _watch(self, engine: int) -> None:
        """Notice the failure of an engine in a process that lives, also while it has no group."""
        watched = functools.partial(self._watched, engine, self._states.process(engine))
        self.engines[engine].watch().add_done_callback(watched)

    def _watched(self, engine: int, process: int, end: Future[None]) -> None:
        error = end.exception()
        if error is not None:
            self.lost(engine, process, error)

    def _keeps_enough(self) -> bool:
        """Return whether as many engines serve as the run needs. If not, leaving ones stay. In an update, `restart_all` decides."""
        if self._in_update:
            return True
        self._stay(self.can_stay()[: max(0, self.least - len(self._sampling))])
        return len(self._sampling) >= self.least

    def _is_updating(self, engine: int) -> bool:
        """Return whether an engine takes part in an update that runs. Engines that load meanwhile do not."""
        return self._in_update and (engine, self._states.process(engine)) in self._updating

    def _count_members(self) -> int:
        with self.lock:
            return len(self._members)

    def _die(self, engine: int, failure: Failure) -> None:
        self._interrupted = self._interrupted or self._is_updating(engine)
        self._loading.pop(engine, None)
        self._last_death = failure
        if engine in self._states.leaving:
            self._remove(engine)
            return
        if not self._states.die(engine):
            return
        serving = pluralize(len(self._sampling), "engine")
        self._add_message(f"{failure}\n{serving} left that sample", "death")
        if engine not in self._states.due:
            self._add_message(self._given_up_text(engine), "given_up")

    def _find_deaths(self) -> None:
        """Look at the processes that nothing has ended on purpose, without the lock: Ray may need a thread that waits for it."""
        services = [handle.service for handle in list(self.engines)]
        failures = [None if service.stopping else service.failure() for service in services]
        with self.lock:
            for engine, failure in enumerate(failures):
                if failure is not None and not self._states.is_dead(engine):
                    self._die(engine, failure)

    def _find_deaths_together(self) -> None:
        """Find dead engines. After a death, look for others for a moment: none must restart for a run that ends, since the end
        would wait for a process that starts."""
        self._find_deaths()
        if self._states.deaths == self._deaths_seen:
            return
        deadline = time.monotonic() + self._together
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self._find_deaths()
        with self.lock:
            self._deaths_seen = self._states.deaths

    def _find_hangs(self) -> None:
        """Let engines that hang count as dead; their restart ends their processes."""
        with self.lock:
            members = self._members
        hung = self._steps.look(members, lambda engine: self.engines[engine].running_step())
        with self.lock:
            for member, cause in hung.items():
                if member in self._states.members:
                    self._die(member[0], Failure.death(self.engines[member[0]].service.known_place, cause))

    def _find_failed(self, members: Sequence[Member]) -> bool:
        """Return whether one of `members` has died, or failed in its part of the update, which counts as a death."""
        self._find_deaths()
        with self.lock:
            for member in self._failed & set(self._states.members):
                cause = "it failed in an update of the weights; see its log"
                self._die(member[0], Failure.death(self.engines[member[0]].service.known_place, cause))
            self._failed.clear()
            return any(member not in self._states.members for member in members)

    def _are_starting(self, members: Sequence[Member]) -> bool:
        with self.lock:
            return bool(set(self._states.starting) & {engine for engine, _ in members})

    def _read_loads(self) -> None:
        """Record new processes that have loaded, with their whole group, or have failed to."""
        for engine, loading in list(self._loading.items()):
            error = loading.exception() if loading.done() else None
            if not loading.done() and time.monotonic() - self._load_began[engine] > self._load_limit:
                cause = f"it has not loaded within rollout.start_timeout = {self._load_limit:g} s; see its log"
                self._die(engine, Failure.death(self.engines[engine].service.known_place, cause))
            elif isinstance(error, ClusterError):
                self._die(engine, error.failure)
            elif error is not None:
                raise error
        for engine in self._groups.whole([each for each, loading in self._loading.items() if loading.done()]):
            self.descriptions[engine] = self._loading.pop(engine).result()
            self._states.load(engine)
            self._watch(engine)
