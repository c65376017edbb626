"""The engine of each group, and the moments at which engines load new weights: a pure state machine.

A group goes to the engine with the fewest groups. With `rollout.at_update: finish` each group keeps the weights that it starts
with. An engine receives new weights into host memory and loads them when it has no group, so engines have different versions.
An engine finishes, which means that it starts no group until it has loaded the newest weights, in two cases: its weights are
too old for any further group, or it is one of the engines with the oldest weights while few others finish. At most
1 / `max_staleness` of the engines finish in the second case, so that they load in turn while the others sample. No engine runs
more than its equal share of all groups that may run, so that groups are left for the engines that load next.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megarl.recipe.derived.at_update import UpdateRule


@dataclass
class _EngineState:
    load: int = 0  # running groups
    version: int | None = None  # of its weights; None before the first update
    finishes: bool = False  # it starts no group until it has loaded the newest weights
    loads: bool = False  # it loads them now
    closed: bool = False  # no group starts on it any more

    @property
    def is_idle(self) -> bool:
        return not (self.load or self.closed)


@dataclass(frozen=True)
class Finishing:
    """Settings of `rollout.at_update: finish`."""

    max_staleness: float
    groups: int  # most groups that run at a time

    @classmethod
    def of(cls, rule: UpdateRule, max_staleness: float, prompts_per_step: int) -> Finishing | None:
        if rule != "finish":
            return None
        return cls(max_staleness, math.ceil((max_staleness + 1) * prompts_per_step))


class Dispatch:
    """State machine of the module's docstring. Not thread-safe: the caller needs a lock."""

    def __init__(self, engines: int, finishing: Finishing | None = None) -> None:
        """engines: their number. finishing: the settings of `rollout.at_update: finish`; None for the other rules."""
        self._engines = [_EngineState() for _ in range(engines)]
        self._finishing = finishing
        self._most_groups = math.inf if finishing is None else math.ceil(finishing.groups / engines)
        self._most_finishing = 0 if finishing is None else max(1, int(engines // max(1.0, finishing.max_staleness)))
        self._version: int | None = None  # the newest
        self._serving: frozenset[int] | None = None  # of the last `open_only`; None: others are closed since then
        # Counted at each change, because the caller reads them for every group
        self.idle = engines  # number of engines without a group, closed ones left out
        self.open = engines  # number of engines on which groups start

    @property
    def versions(self) -> list[int | None]:
        """Version of the weights of each engine; None before the first update."""
        return [engine.version for engine in self._engines]

    def close(self, engine: int) -> None:
        """Start no further group on an engine. ValueError if no other engine is open."""
        if all(each.closed for index, each in enumerate(self._engines) if index != engine):
            raise ValueError(f"no engine but number {engine} is open, so its groups cannot move")
        self._engines[engine].closed, self._serving = True, None
        self._count()

    def open_only(self, serving: Collection[int]) -> None:
        """Start further groups only on the `serving` engines, which have the newest weights. Their indices may be new."""
        if (serving := frozenset(serving)) == self._serving:
            return
        self._serving = serving
        missing = max(serving, default=-1) + 1 - len(self._engines)
        self._engines += [_EngineState(version=self._version) for _ in range(missing)]
        for index, engine in enumerate(self._engines):
            engine.closed = index not in serving
        self._count()

    def add_version(self, version: int) -> None:
        """Record that all engines have received weights. They load the first weights at once, and with finish only these."""
        self._version = version
        for engine in self._engines:
            if engine.version is None or self._finishing is None:
                engine.version = version
        self._choose_finishing()

    def start(self, capacity: Callable[[int], int]) -> list[int]:
        """Return the engine of each group that starts now. `capacity`: groups that may start with weights of a version."""
        if self._finishing is None and (self._version is None or capacity(self._version) <= 0):
            return []  # all engines have the same weights
        ready = [
            (engine.load, index) for index, engine in enumerate(self._engines) if not (engine.finishes or engine.closed)
        ]
        capacities = {version: capacity(version) for version in self._versions(ready)}
        heapq.heapify(ready)
        started: list[int] = []
        while ready:
            load, index = ready[0]
            engine = self._engines[index]
            # A group that starts takes a place of every version.
            too_old = engine.version is None or capacities[engine.version] <= len(started)
            if too_old or load >= self._most_groups:
                engine.finishes = too_old and self._is_behind(engine)
                heapq.heappop(ready)
                continue
            self._add(engine, 1)
            heapq.heapreplace(ready, (load + 1, index))
            started.append(index)
        return started

    def _versions(self, engines: list[tuple[int, int]]) -> set[int]:
        versions = (self._engines[index].version for _, index in engines)
        return {version for version in versions if version is not None}

    def start_again(self, groups: int) -> list[int]:
        """Return the engine of each of `groups` that have run, before a restart or on another engine, and run again now."""
        if not groups:
            return []
        started, is_open = [], [index for index, engine in enumerate(self._engines) if not engine.closed]
        for _ in range(groups):
            index = min(is_open, key=lambda index: (self._engines[index].load, index))
            self._add(self._engines[index], 1)
            started.append(index)
        return started

    def finish_all(self) -> None:
        """Let every engine with older weights finish."""
        for engine in self._engines:
            engine.finishes = self._is_behind(engine)

    @property
    def behind(self) -> int:
        """Number of engines that have not loaded the newest weights."""
        return sum(self._is_behind(engine) for engine in self._engines)

    def remove(self, engine: int) -> None:
        """Record that a group of an engine has ended."""
        self._add(self._engines[engine], -1)

    def take_due_loads(self) -> list[int]:
        """Return the engines that have finished and must now load the newest weights."""
        if self._finishing is None:
            return []
        due = [
            index for index, engine in enumerate(self._engines) if engine.finishes and not (engine.load or engine.loads)
        ]
        for index in due:
            self._engines[index].loads = True
        return due

    def loaded(self, engine: int, version: int) -> None:
        """Record that an engine has loaded weights."""
        state = self._engines[engine]
        state.version, state.loads, state.finishes = version, False, False
        self._choose_finishing()

    def _add(self, engine: _EngineState, groups: int) -> None:
        was_idle = engine.is_idle
        engine.load += groups
        self.idle += engine.is_idle - was_idle

    def _count(self) -> None:
        self.idle = sum(engine.is_idle for engine in self._engines)
        self.open = sum(not engine.closed for engine in self._engines)

    def _is_behind(self, engine: _EngineState) -> bool:
        # An engine may be ahead: it may load weights that have arrived before `add_version` is called.
        return engine.version is not None and self._version is not None and engine.version < self._version

    def _choose_finishing(self) -> None:
        """Let further engines finish, up to the limit, those with the oldest weights and the fewest groups first."""
        finishing = sum(engine.finishes for engine in self._engines)
        behind = [engine for engine in self._engines if self._is_behind(engine) and not engine.finishes]
        behind.sort(key=lambda engine: (engine.version, engine.load))
        for engine in behind[: max(0, self._most_finishing - finishing)]:
            engine.finishes = True
