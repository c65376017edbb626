"""States of engines that may die, join and leave while the run goes on: no clocks, processes or threads.

    serving --dies--> dead --restarts--> starting --loads--> loaded --update of the weights--> serving
    serving --leaves--> leaving --is removed--> gone, or dead if its machine leaves --wanted again--> dead
    loaded --leaves--> leaving; dead, starting --leaves--> gone
    leaving, if it has served --stays--> serving

An engine dies in any state. A leaving engine has then left, which does not count as a death. A new process has no weights of the run, so it
samples only after an update. A leaving engine gets no further group, and receives the weights while it has some.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

MACHINE_SECONDS = 30.0  # between attempts to find a machine for an engine
MOST_STARTS = 3  # of an engine in a row that die before it samples; it is then left dead

Member = tuple[int, int]
"""Index of an engine, and the number of its process."""


class EngineState(Enum):
    """State of an engine, as in the module's docstring."""

    SERVING = "serving"
    DEAD = "dead"
    STARTING = "starting"
    LOADED = "loaded"
    LEAVING = "leaving"
    GONE = "gone"


# Order in which engines leave when fewer are wanted: first the ones that do not sample.
_LEAVE_ORDER = (EngineState.DEAD, EngineState.STARTING, EngineState.LOADED, EngineState.SERVING)


@dataclass
class _Engine:
    state: EngineState = EngineState.SERVING
    process: int = 0  # number of its process, from 0; -1 before the first one
    starts: int = 0  # of new processes that died, since it sampled last
    died: bool = False  # the present process has died; False if it left
    deaths: int = 0
    returns: bool = False  # it leaves with its machine, and starts again on another one
    served: bool = False  # before it left
    ended: int = -1  # number of its newest process that was ended because it left


class EngineStates:
    """State machine of the module's docstring. Not thread-safe: the caller needs a lock."""

    def __init__(self, engines: int) -> None:
        """engines: their number, all serving."""
        self._engines = [_Engine() for _ in range(engines)]
        self.wanted = engines
        self.deaths = 0

    @property
    def count(self) -> int:
        """Number of engines in all states."""
        return len(self._engines)

    def die(self, engine: int) -> bool:
        """Record the death of an engine; return False if it is dead already, or was leaving."""
        state = self._engines[engine]
        if self.is_dead(engine):
            return False
        if state.state is EngineState.LEAVING:
            self.remove(engine)
            return False
        self.deaths += 1
        state.deaths += 1
        state.state, state.died = EngineState.DEAD, True
        return True

    def end(self, engine: int) -> None:
        """Record that the controller ends a living engine, which is not a death."""
        if self._engines[engine].state is EngineState.LEAVING:
            self.remove(engine)
        else:
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
        """Record that `members` have received the weights; return the ones that serve from now on."""
        joined = []
        for index, process in members:
            engine = self._engines[index]
            if engine.state is EngineState.LOADED and engine.process == process:
                engine.state, engine.starts = EngineState.SERVING, 0
                joined.append(index)
        return joined

    # --- changes of the number of engines ------------------------------------------------------------------------------

    def surplus(self) -> list[int]:
        """Return the engines that should leave, so that `wanted` remain: first the ones that do not sample, then the newest."""
        staying = self.staying
        by_order = sorted(staying, key=lambda engine: (_LEAVE_ORDER.index(self.state(engine)), -engine))
        return by_order[: max(0, len(staying) - self.wanted)]

    def missing(self) -> int:
        """Return the number of engines that must be added, so that `wanted` remain. Engines that return on another machine count."""
        returning = sum(each.state is EngineState.LEAVING and each.returns for each in self._engines)
        return max(0, self.wanted - len(self.staying) - returning)

    def add(self) -> int:
        """Add an engine, or bring back one that is gone; return its index. It is dead until it restarts."""
        index = next((i for i, engine in enumerate(self._engines) if engine.state is EngineState.GONE), self.count)
        if index == self.count:
            self._engines.append(_Engine(EngineState.DEAD, process=-1))
        else:
            engine = self._engines[index]
            engine.state, engine.starts, engine.died = EngineState.DEAD, 0, False
        return index

    def leave(self, engine: int, *, returns: bool = False) -> bool:
        """Let an engine leave. Returns whether it may have groups or take part in an update, which must end first; otherwise it
        has left at once.

        returns: its machine leaves; the engine stays wanted, and starts again on another machine.
        """
        state = self._engines[engine]
        is_busy = state.state in (EngineState.SERVING, EngineState.LOADED, EngineState.LEAVING)
        if state.state is not EngineState.LEAVING:
            state.served = state.state is EngineState.SERVING
        state.state, state.returns = EngineState.LEAVING, returns
        if not is_busy:
            self.remove(engine)
        return is_busy

    def can_stay(self, engine: int) -> bool:
        """Return whether an engine leaves that could serve instead: it has weights, and its machine does not leave."""
        state = self._engines[engine]
        return state.state is EngineState.LEAVING and state.served and not state.returns

    def stay(self, engine: int) -> None:
        """Record that a leaving engine serves again."""
        assert self.can_stay(engine), self._engines[engine]
        self._engines[engine].state = EngineState.SERVING

    def remove(self, engine: int) -> None:
        """Record that a leaving engine has left: it has no groups any more, or its process ends with them."""
        state = self._engines[engine]
        assert state.state is EngineState.LEAVING, state
        state.state = EngineState.DEAD if state.returns else EngineState.GONE
        state.died, state.ended = False, state.process

    def has_left(self, member: Member) -> bool:
        """Return whether a process has ended because its engine left."""
        return member[1] <= self._engines[member[0]].ended

    # --- views ---------------------------------------------------------------------------------------------------------

    def state(self, engine: int) -> EngineState:
        return self._engines[engine].state

    def process(self, engine: int) -> int:
        """Return the number of an engine's process."""
        return self._engines[engine].process

    def deaths_of(self, engine: int) -> int:
        """Return how often an engine has died."""
        return self._engines[engine].deaths

    def is_dead(self, engine: int) -> bool:
        """Return whether an engine has no process."""
        return self.state(engine) in (EngineState.DEAD, EngineState.GONE)

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
        """Engines with a new process that loads the model."""
        return self._in([EngineState.STARTING])

    @property
    def serving(self) -> list[int]:
        """Engines that sample, and get groups."""
        return self._in([EngineState.SERVING])

    @property
    def leaving(self) -> list[int]:
        """Engines that still have groups, and get no further ones."""
        return self._in([EngineState.LEAVING])

    @property
    def staying(self) -> list[int]:
        """Engines that are neither leaving nor gone."""
        return self._in(_LEAVE_ORDER)

    @property
    def members(self) -> list[Member]:
        """Engines that take part in an update of the weights."""
        states = (EngineState.SERVING, EngineState.LOADED, EngineState.LEAVING)
        return [(index, self.process(index)) for index in self._in(states)]

    def _in(self, states: Collection[EngineState]) -> list[int]:
        return [index for index, engine in enumerate(self._engines) if engine.state in states]
