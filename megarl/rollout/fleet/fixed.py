"""Engines of a fixed model, a teacher or the judge, which may die while the run goes on (`teacher.restarts`, `judge.restarts`).

    serving --dies--> dead --restarts--> starting --loads--> serving

The model never changes, so a new process serves once it has loaded. The calls of a dead one are made again, with the same arguments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from megarl.cluster.failures import ClusterError, Failure, MachineLost, TooFewEngines
from megarl.errors import ProcessFailure, pluralize
from megarl.recipe.judge import JUDGE, JudgeConfig, TeacherConfig
from megarl.recipe.observe import Event
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import JudgeHandle, TeacherHandle, failed_in, is_death
from megarl.rollout.fleet.states import MACHINE_SECONDS
from megarl.types import Metrics

Handle = TypeVar("Handle", bound=TeacherHandle | JudgeHandle)
T = TypeVar("T")


@dataclass(eq=False)
class _Call(Generic[Handle, T]):
    """A call that any engine may answer. engine: the one that answers it if it serves; None: the one with the fewest calls."""

    start: Callable[[Handle], Future[T]]
    engine: int | None
    since: float  # its start
    answer: Future[T] = field(default_factory=Future)


@dataclass(eq=False)
class _Process:
    """A process of an engine."""

    began: float  # its start
    loading: Future[Any] | None = None  # None: it has loaded
    is_dead: bool = False
    calls: int = 0  # that run
    since: float = 0.0  # its last answer, or the first call after a time without calls


class FixedModelEngines(Generic[Handle]):
    """Engines of one fixed model. With `restarts` 0 the death of an engine is an error of its calls, and ends the run.

    Transport threads report answers; the controller's thread polls and restarts. The lock is not held while a process is ended,
    since its calls then fail in transport threads that need the lock.
    """

    def __init__(
        self,
        role: Literal["teacher", "judge"],
        engines: Sequence[Handle],
        settings: TeacherConfig | JudgeConfig,
        restart: Callable[[Handle], None],
        notice: Callable[[str, Event | None], None],
        load_limit: float,
    ) -> None:
        """settings: `restarts` and `timeout` are read. restart: ends an engine's process if it still runs, and starts a new one behind
        its handle. notice: receives messages for the user, with their event. load_limit: seconds after which a new process that has
        not loaded counts as dead."""
        self.role, self.engines, self._restart, self._notice = role, list(engines), restart, notice
        self._most, self._limit, self._load_limit = settings.restarts, settings.timeout, load_limit
        self._lock = threading.RLock()
        self._processes = [_Process(time.monotonic()) for _ in self.engines]
        self._deaths_in_a_row = [0] * len(self.engines)  # without an answer in between
        self._not_before = [0.0] * len(self.engines)  # time of the next attempt to find a machine
        self._waiting: list[_Call[Handle, Any]] = []  # while no engine serves
        self._newest_death: Failure | None = None
        self._messages: list[tuple[str, Event | None]] = []
        self.deaths = 0

    # --- called by any thread --------------------------------------------------------------------------------------------

    def ask(self, start: Callable[[Handle], Future[T]], engine: int | None = None) -> Future[T]:
        """Start a call on an engine, and again on another one if the process dies. It waits while none serves.

        start: starts the call; its answer must depend on its arguments alone. engine: the engine that answers if it serves; None: the
        one with the fewest calls.
        """
        call = _Call(start, engine, time.monotonic())
        self._start(call)
        return call.answer

    # --- called by the controller's thread -------------------------------------------------------------------------------

    def poll(self) -> None:
        """Find engines that have died or are silent, restart them, and print messages. Call it about every second.

        Raises TooFewEngines if none is left, and ProcessFailure for a silent engine if none may restart.
        """
        failures = self._find_deaths()
        with self._lock:
            for engine, failure in failures:
                self._die(engine, self._processes[engine], failure)
            self._find_silent()
            self._read_loads()
            dead = [engine for engine, process in enumerate(self._processes) if process.is_dead]
            due = [engine for engine in dead if self._deaths_in_a_row[engine] <= self._most]
            messages, self._messages = self._messages, []
            failure_of_all = self._newest_death if not due and len(dead) == len(self.engines) else None
        for message in messages:
            self._notice(*message)
        if failure_of_all is not None:
            names = ", ".join(engine.name for engine in self.engines)
            text = f"\nNo engine of the {self.role} is left ({self.role}.restarts = {self._most}). Without a process: {names}."
            raise TooFewEngines(failure_of_all, text)
        for engine in due:
            if time.monotonic() >= self._not_before[engine]:
                self._start_again(engine)
        self._start_waiting()

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _start(self, call: _Call[Handle, Any]) -> None:
        with self._lock:
            engine = self._chosen(call)
            if engine is None:
                self._waiting.append(call)
                return
            process = self._processes[engine]
            if not process.calls:
                process.since = time.monotonic()
            process.calls += 1
            running = call.start(self.engines[engine])  # with the lock, so that it reaches this process
        running.add_done_callback(lambda running: self._ended(call, engine, process, running))

    def _chosen(self, call: _Call[Handle, Any]) -> int | None:
        serving = [
            each for each, process in enumerate(self._processes) if process.loading is None and not process.is_dead
        ]
        if call.engine in serving:
            return call.engine
        return min(serving, key=lambda each: self._processes[each].calls, default=None)

    def _ended(self, call: _Call[Handle, T], engine: int, process: _Process, running: Future[T]) -> None:
        """Pass the result of a call on, or make it again if the process has died."""
        try:
            result = running.result()
        except BaseException as error:  # noqa: BLE001 -- the answer raises it
            with self._lock:
                process.calls -= 1
                is_lost = self._is_lost(engine, process, error)
            if is_lost:
                self._start(call)
            else:
                call.answer.set_exception(error)
            return
        with self._lock:
            process.calls -= 1
            process.since = time.monotonic()
            self._deaths_in_a_row[engine] = 0
        call.answer.set_result(result)

    def _is_lost(self, engine: int, process: _Process, error: BaseException) -> bool:
        """Return whether a call has failed because its process has died, and is made again."""
        if not self._most or not failed_in(error, self.engines[engine].name):
            return False
        if process.is_dead:
            return True
        if self.engines[engine].service.stopping:
            return False  # the run ends
        if not is_death(error):
            return False
        self._die(engine, process, error.failure)
        return True

    def _die(self, engine: int, process: _Process, failure: Failure) -> None:
        if process.is_dead:
            return
        process.is_dead, process.loading, self._newest_death = True, None, failure
        self.deaths += 1
        self._deaths_in_a_row[engine] += 1
        count, name = self._deaths_in_a_row[engine], self.engines[engine].name
        left = sum(process.loading is None and not process.is_dead for process in self._processes)
        text = f"{failure}\n{pluralize(left, 'engine')} of the {self.role} left; "
        if count <= self._most:
            text += f"it starts again (death {count} of at most {self._most} without an answer in between; {self.role}.restarts)"
            self._messages.append((text, "death"))
        else:
            self._messages.append(
                (
                    f"{text}{name} does not start again ({self.role}.restarts = {self._most}). A restart of the run starts it again.",
                    "given_up",
                )
            )

    def _find_deaths(self) -> list[tuple[int, Failure]]:
        """Return the engines with an ended process. Does not take the lock, since Ray may need a thread that waits for the lock."""
        if not self._most:
            return []  # the cluster's check raises
        services = [(engine, handle.service) for engine, handle in enumerate(self.engines)]
        ended = [(engine, service.failure()) for engine, service in services if not service.stopping]
        return [(engine, failure) for engine, failure in ended if failure is not None]

    def _find_silent(self) -> None:
        """Let engines that answer no call for too long count as dead; their restart ends their processes."""
        now, key = time.monotonic(), f"{self.role}.timeout"
        for engine, process in enumerate(self._processes):
            seconds = now - process.since
            if not process.calls or process.is_dead or seconds <= self._limit:
                continue
            name = self.engines[engine].name
            cause = f"has answered no call for {seconds:.0f} s ({key} = {self._limit:g}); {pluralize(process.calls, 'call')} wait for it"
            if not self._most:
                raise ProcessFailure(
                    f"{name} {cause}. Its log is in the run's logs/{name}.log; raise {key} if the {self.role} is slow."
                )
            self._die(engine, process, Failure.death(self.engines[engine].service.known_place, f"it {cause}"))

    def _read_loads(self) -> None:
        for engine, process in enumerate(self._processes):
            if process.loading is None:
                continue
            if not process.loading.done():
                if time.monotonic() - process.began > self._load_limit:
                    cause = f"it has not loaded within rollout.start_timeout = {self._load_limit:g} s; see its log"
                    self._die(engine, process, Failure.death(self.engines[engine].service.known_place, cause))
                continue
            error = process.loading.exception()
            if error is None:
                process.loading = None
                self._messages.append((f"{self.engines[engine].name} has loaded, and answers", None))
            elif isinstance(error, ClusterError):
                self._die(engine, process, error.failure)
            else:
                raise error

    def _start_again(self, engine: int) -> None:
        """Start a new process of an engine, or wait if its machine has left the cluster and no other one has devices."""
        handle = self.engines[engine]
        try:
            self._restart(handle)
        except MachineLost as error:
            if not self._not_before[engine]:
                self._notice(f"{handle.name} waits for a machine: {error}", "warning")
            self._not_before[engine] = time.monotonic() + MACHINE_SECONDS
            return
        self._not_before[engine] = 0.0
        with self._lock:
            self._processes[engine] = _Process(time.monotonic(), handle.start())

    def _start_waiting(self) -> None:
        """Start the calls that wait for an engine. Raises TooFewEngines if they wait for a machine for too long."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._start(call)
        with self._lock:
            is_starting = any(process.loading is not None for process in self._processes)
            seconds = time.monotonic() - min((call.since for call in self._waiting), default=time.monotonic())
        if not is_starting and seconds > self._limit and self._newest_death is not None:
            text = f"\nNo engine of the {self.role} has had a machine for {seconds:.0f} s ({self.role}.timeout)."
            raise TooFewEngines(self._newest_death, text)


def death_metrics(recipe: Recipe, engines: Sequence[FixedModelEngines[Any]]) -> Metrics:
    """Return the deaths so far of engines of the teachers and the judge, if the run survives them."""
    survived = {"teacher": recipe.teacher.restarts > 0, JUDGE: recipe.judge.restarts > 0}
    metrics: Metrics = {}
    for each in engines:
        if survived[each.role]:
            name = f"fleet/{each.role}_deaths"
            metrics[name] = metrics.get(name, 0.0) + each.deaths
    return metrics
