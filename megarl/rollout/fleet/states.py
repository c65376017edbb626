"""States of engines that may die while the run goes on: no clocks, processes or threads.

    serving --dies--> dead --restarts--> starting --loads--> loaded --update of the weights--> serving

An engine dies in any state. A new process has no weights of the run, so it samples only after an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MOST_STARTS = 3  # of an engine in a row that die before it samples; it is then left dead

Member = tuple[int, int]
"""Index of an engine, and the number of its process."""


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
    starts: int = 0  # of new processes that died, since it sampled last
    died: bool = False  # by itself, in the present process


class EngineStates:
    """State machine of the module's docstring. Not thread-safe: the caller needs a lock."""

    def __init__(self, engines: int) -> None:
        """engines: their number, all serving."""
        self._engines = [_Engine() for _ in range(engines)]
        self.deaths = 0

    def die(self, engine: int) -> bool:
        """Record that an engine has died by itself; return False if it is dead already."""
        state = self._engines[engine]
        if state.state is EngineState.DEAD:
            return False
        self.deaths += 1
        state.state, state.died = EngineState.DEAD, True
        return True

    def end(self, engine: int) -> None:
        """Record that the controller ends a living engine, which is not a death."""
        self._engines[engine].state = EngineState.DEAD

    def restart(self, engine: int) -> None:
        """Record that a dead engine gets a new process."""
        state = self._engines[engine]
        assert state.state is EngineState.DEAD, state
        state.state = EngineState.STARTING
        state.process += 1
        state.starts += state.died
        state.died = False

    def wait_for_machine(self, engine: int) -> None:
        """Record that the new process of `restart` cannot start yet: no machine has devices for it."""
        state = self._engines[engine]
        state.state = EngineState.DEAD
        state.process -= 1

    def load(self, engine: int) -> None:
        """Record that a new process has loaded the model."""
        state = self._engines[engine]
        assert state.state is EngineState.STARTING, state
        state.state = EngineState.LOADED

    def update(self, members: Sequence[Member]) -> list[int]:
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
        """Dead engines that may restart."""
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
    def members(self) -> list[Member]:
        """Engines that take part in an update of the weights."""
        return [(index, self.process(index)) for index in self._in(EngineState.SERVING, EngineState.LOADED)]

    def _in(self, *states: EngineState) -> list[int]:
        return [index for index, engine in enumerate(self._engines) if engine.state in states]
