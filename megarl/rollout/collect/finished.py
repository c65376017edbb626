"""Groups that have finished in a rollout process and wait for the controller."""

from __future__ import annotations

import asyncio
from collections import deque

from megarl.cluster.failures import Raised
from megarl.engines.base import GenerationAborted
from megarl.types import Group, SampleTokens

Scored = tuple[Group, list[SampleTokens]]
"""Control data of a group, and the token vectors of its samples."""

FinishedGroup = tuple[int, Group | Raised]
"""Number of a group, and its control data, or the error that ended its sampling or scoring."""


class FinishedGroups:
    """Queue of finished groups, in the order in which they finished. Use it from one asyncio loop."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, Scored | Raised]] = deque()
        self._changed = asyncio.Event()
        self._controllers = 0  # that have died

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, number: int, scored: Scored) -> None:
        """Add a scored group."""
        self._add(number, scored)

    def fail(self, number: int, error: BaseException) -> None:
        """Add a group whose sampling or scoring raised `error`."""
        self._add(number, Raised.of(error))

    async def take(self, most: int) -> tuple[list[FinishedGroup], list[list[SampleTokens]]]:
        """Wait for a finished group; remove and return up to `most` groups, and the vectors of each scored one in the same order.

        Raises GenerationAborted if the controller that waits has died (`forget`).
        """
        controllers = self._controllers
        while not self._groups:
            self._changed.clear()
            await self._changed.wait()
            if controllers != self._controllers:
                raise GenerationAborted("its controller has died")
        taken = [self._groups.popleft() for _ in range(min(most, len(self._groups)))]
        control = [(number, each if isinstance(each, Raised) else each[0]) for number, each in taken]
        return control, [each[1] for _, each in taken if not isinstance(each, Raised)]

    def forget(self) -> None:
        """Drop all groups of a controller that has died, and end its calls of `take`."""
        self._groups.clear()
        self._controllers += 1
        self._changed.set()

    def _add(self, number: int, outcome: Scored | Raised) -> None:
        self._groups.append((number, outcome))
        self._changed.set()
