"""Engines that may die while the run goes on (`rollout.min_engines`): which of them sample, start again, and wait for weights.

    serving --dies--> dead --starts--> starting --loads--> loaded --update of the weights--> serving

An engine dies in any state. A new process has no weights of the run, so it samples only after an update. If an engine dies in an
update, the others may have parts of the new weights: all start again, and the update is repeated.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megarl.cluster.failures import ClusterError, Failure, ServiceDied
from megarl.rollout.engine_handle import EngineHandle
from megarl.text import pluralize
from megarl.types import Metrics

MOST_STARTS = 3  # of an engine in a row that end before it samples; it is then left dead
MOST_LOSSES = 3  # engines that may die while they sample the same group
DEATH_SECONDS = 10.0  # time after an aborted update in which a death must show; otherwise it had another cause
_POLL_SECONDS = 0.2


class EngineState(Enum):
    """State of an engine, as in the module's docstring."""

    SERVING = "serving"
    DEAD = "dead"
    STARTING = "starting"
    LOADED = "loaded"


@dataclass
class _Engine:
    state: EngineState = EngineState.SERVING
    process: int = 0  # number of its process, from 0
    starts: int = 0  # of new processes, since it sampled last


class EngineStates:
    """State machine of the module's docstring. Not thread-safe: the caller needs a lock."""

    def __init__(self, engines: int) -> None:
        """engines: their number, all serving."""
        self._engines = [_Engine() for _ in range(engines)]
        self.deaths = 0

    def die(self, engine: int) -> bool:
        """Record the death of an engine; return False if it is dead already."""
        state = self._engines[engine]
        if state.state is EngineState.DEAD:
            return False
        self.deaths += 1
        state.state = EngineState.DEAD
        return True

    def drop(self, engine: int) -> None:
        """Record that an engine is ended on purpose, to start again."""
        self._engines[engine].state = EngineState.DEAD

    def start(self, engine: int) -> None:
        """Record that a new process of a dead engine has started."""
        state = self._engines[engine]
        assert state.state is EngineState.DEAD, state
        state.state = EngineState.STARTING
        state.process += 1
        state.starts += 1

    def load(self, engine: int) -> None:
        """Record that a new process has loaded the model."""
        state = self._engines[engine]
        assert state.state is EngineState.STARTING, state
        state.state = EngineState.LOADED

    def update(self, members: Sequence[tuple[int, int]]) -> list[int]:
        """Record that `members` have received the weights; return those that serve from now on."""
        joined = []
        for index, process in members:
            engine = self._engines[index]
            if engine.state is EngineState.LOADED and engine.process == process:
                engine.state, engine.starts = EngineState.SERVING, 0
                joined.append(index)
        return joined

    def process(self, engine: int) -> int:
        """Return the number of an engine's process."""
        return self._engines[engine].process

    def is_dead(self, engine: int) -> bool:
        return self._engines[engine].state is EngineState.DEAD

    @property
    def due(self) -> list[int]:
        """Dead engines that may start again."""
        return [
            index
            for index, engine in enumerate(self._engines)
            if engine.state is EngineState.DEAD and engine.starts < MOST_STARTS
        ]

    @property
    def starting(self) -> list[int]:
        """Engines whose new process loads the model."""
        return self._in(EngineState.STARTING)

    @property
    def serving(self) -> list[int]:
        """Engines that sample."""
        return self._in(EngineState.SERVING)

    @property
    def members(self) -> list[tuple[int, int]]:
        """Engines that take part in an update of the weights, each with the number of its process."""
        return [(index, self.process(index)) for index in self._in(EngineState.SERVING, EngineState.LOADED)]

    def _in(self, *states: EngineState) -> list[int]:
        return [index for index, engine in enumerate(self._engines) if engine.state in states]


class Fleet:
    """The engines of a run with `rollout.min_engines`. Thread-safe."""

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        descriptions: Sequence[dict[str, Any]],
        least: int,
        restart: Callable[[int], None],
        notice: Callable[[str], None],
    ) -> None:
        """descriptions: results of the engines' `start`. least: `rollout.min_engines`. restart: ends what is left of an
        engine's process, and starts a new one behind its handle. notice: receives messages for the user."""
        self.engines, self.descriptions = list(engines), list(descriptions)
        self._least, self._restart, self._notice = least, restart, notice
        self._states = EngineStates(len(self.engines))
        self._lock = threading.RLock()
        self._loading: dict[int, Future[dict[str, Any]]] = {}
        self._messages: list[str] = []
        self._last_death: Failure | None = None
        self._in_update = False
        self._interrupted = False  # an engine has failed in the update, and no engine samples until it is repeated
        self._sampled_again = 0  # groups, since the last metrics

    def process(self, engine: int) -> int:
        """Return the number of an engine's process, for `lost`."""
        with self._lock:
            return self._states.process(engine)

    def lost(self, engine: int, process: int, error: BaseException) -> bool:
        """Return whether a call failed because its engine has died, and the run goes on.

        process: number of the engine's process when the call began.
        """
        failure = self._death(engine, error)
        if failure is None:
            return False
        with self._lock:
            if process != self._states.process(engine):
                return True
            self._die(engine, failure)
            return self._enough()

    def _death(self, engine: int, error: BaseException) -> Failure | None:
        """Return the failure of an engine that has died, or that failed in a process that lives; None for other errors."""
        if not isinstance(error, ClusterError) or error.failure.place.name != f"service {self.engines[engine].name}":
            return None
        failed_inside = error.failure.cause.startswith("EngineDead:")
        return error.failure if isinstance(error, ServiceDied) or failed_inside else None

    def _die(self, engine: int, failure: Failure) -> None:
        self._interrupted = self._interrupted or self._in_update
        if self._in_update and not failure.died:
            return  # it failed because another one died, or the whole update fails
        if self._states.die(engine):
            self._loading.pop(engine, None)
            self._last_death = failure
            self._messages.append(f"{failure}\n{pluralize(len(self._states.serving), 'engine')} left that sample")
            if engine not in self._states.due:
                text = f"{self.engines[engine].name} has ended {MOST_STARTS} times before it sampled, and does not start again"
                self._messages.append(text)

    def _enough(self) -> bool:
        """Return whether enough engines are left. In a repeated update, those count that start again."""
        if self._in_update:
            return True
        return len(self._states.serving) >= self._least

    def count_sampled_again(self) -> None:
        """Count a group that another engine samples from its start."""
        with self._lock:
            self._sampled_again += 1

    @property
    def serving(self) -> list[int]:
        """Engines that may be given groups."""
        with self._lock:
            return [] if self._interrupted else self._states.serving

    def members(self) -> list[tuple[int, int]]:
        """Return the engines that take part in the next update, each with the number of its process."""
        with self._lock:
            return self._states.members

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """In the block an update of the weights runs, or several until one succeeds."""
        with self._lock:
            self._in_update = True
        try:
            yield
        finally:
            with self._lock:
                self._in_update = self._interrupted = False

    def updated(self, members: Sequence[tuple[int, int]]) -> None:
        """Record that `members` have the newest weights: those that were loaded sample from now on."""
        with self._lock:
            for engine in self._states.update(members):
                self._messages.append(f"{self.engines[engine].name} has the run's weights, and samples")

    def poll(self) -> None:
        """Find dead engines, start new processes and print messages. Call it about every second, from the controller's thread.

        Raises ServiceDied if fewer engines than `rollout.min_engines` are left.
        """
        with self._lock:
            self._find_deaths()
            self._read_loads()
            alive = len(self._states.due) + len(self._states.starting) + len(self._states.members)
            if not self._enough() or alive < self._least:
                self._print()
                assert self._last_death is not None
                raise ServiceDied(
                    self._last_death, f"\nFewer than rollout.min_engines = {self._least} engines are left."
                )
            for engine in self._states.due:
                self._restart(engine)
                self._states.start(engine)
                self._loading[engine] = self.engines[engine].start()
                self._messages.append(f"{self.engines[engine].name} starts again")
            self._print()

    def start_all_again(self, members: Sequence[tuple[int, int]], error: Exception, limit: float) -> None:
        """After an aborted update of `members`: end them all, and return when new processes have loaded.

        Raises `error` if none of them has died; RuntimeError after `limit` seconds; and as `poll` does.
        """
        deadline = time.monotonic() + DEATH_SECONDS
        while not self._has_death(members):
            if time.monotonic() > deadline:
                raise error
            time.sleep(_POLL_SECONDS)
        with self._lock:
            for engine, _ in members:
                self._states.drop(engine)
            self._messages.append("all engines start again, and the update of the weights is repeated")
        deadline = time.monotonic() + limit
        while self._is_starting():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the engines have not started again within rollout.start_timeout = {limit:g} s"
                ) from error
            time.sleep(_POLL_SECONDS)

    def _has_death(self, members: Sequence[tuple[int, int]]) -> bool:
        with self._lock:
            self._find_deaths()
            return any(member not in self._states.members for member in members)

    def _is_starting(self) -> bool:
        self.poll()
        with self._lock:
            return bool(self._loading)

    def _find_deaths(self) -> None:
        for engine, handle in enumerate(self.engines):
            if not self._states.is_dead(engine) and (failure := handle.service.failure()) is not None:
                self._die(engine, failure)

    def _read_loads(self) -> None:
        for engine, loading in list(self._loading.items()):
            if not loading.done():
                continue
            del self._loading[engine]
            error = loading.exception()
            if error is None:
                self.descriptions[engine] = loading.result()
                self._states.load(engine)
            elif isinstance(error, ClusterError):
                self._die(engine, error.failure)
            else:
                raise error

    def _print(self) -> None:
        messages, self._messages = self._messages, []
        for message in messages:
            self._notice(message)

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last call."""
        with self._lock:
            again, self._sampled_again = self._sampled_again, 0
            return {
                "fleet/serving": float(len(self._states.serving)),
                "fleet/deaths": float(self._states.deaths),
                "fleet/sampled_again": float(again),
            }
