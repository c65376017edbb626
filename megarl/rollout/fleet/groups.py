"""Groups of engines that run each step together (`rollout.data_parallel`), so that they start, sample and end together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineGroups:
    """Groups of `size` consecutive engines. Engines that run alone are groups of one."""

    size: int = 1

    def of(self, engine: int) -> range:
        """Return the engines of the group of `engine`."""
        first = engine - engine % self.size
        return range(first, first + self.size)

    def split(self, engines: Collection[int]) -> list[list[int]]:
        """Return the groups that are complete in `engines`, in order."""
        firsts = sorted({self.of(engine)[0] for engine in engines})
        return [[*self.of(first)] for first in firsts if {*self.of(first)} <= {*engines}]

    def whole(self, engines: Collection[int]) -> list[int]:
        """Return the engines of the groups that are complete in `engines`, in order."""
        return [engine for group in self.split(engines) for engine in group]
