"""How many groups may be under way, which finish, and which make up the next batch: a pure state machine.

With P prompts a step and staleness S, weights of version v may have started (S + v + 1) P groups that
count. A group that dynamic sampling filters leaves the count, so another takes its place; nothing more
is needed for resampling. Groups are released in admission order, whatever order they finish in: batches
are then not biased towards short responses, and do not depend on timing.

A batch is closed short when `max_attempts` times P groups were tried for it. The missing ones count as
accepted, so that samples never become staler than S.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megarl.types import Group


@dataclass
class AdmissionState:
    """The counters of a run, all in groups."""

    admitted: int = 0  # ever started: also the next group's number and the data cursor
    counted: int = 0  # accepted or forfeited
    released: int = 0  # the next group number to release


@dataclass
class TriedGroup:
    """A group that has finished, and whether it may be trained on."""

    group: Group
    accepted: bool


def accepted_groups(tried: list[TriedGroup]) -> list[Group]:
    return [item.group for item in tried if item.accepted]


class Admission:
    """Not thread-safe: its owner holds a lock."""

    def __init__(self, prompts_per_step: int, max_staleness: int, max_attempts: int | None, continuous: bool):
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.max_attempts = max_attempts  # None: nothing is filtered, nothing is bounded
        self.continuous = continuous
        self.state = AdmissionState()
        self.version: int | None = None  # None: closed
        self.running = 0
        self.tried: list[TriedGroup] = []  # released, of the batch that is being gathered
        self.closed: deque[list[TriedGroup]] = deque()  # batches to be taken
        self._finished: dict[int, TriedGroup] = {}  # waiting for earlier groups

    def capacity(self) -> int:
        """Groups that may start now."""
        if self.version is None or (self.running and not self.continuous):
            return 0
        allowed = (self.max_staleness + self.version + 1) * self.prompts_per_step
        free = allowed - self.state.counted - self.running
        if self.max_attempts is not None:
            tries = (self.max_staleness + 1) * self.max_attempts * self.prompts_per_step
            free = min(free, tries - len(self.tried) - len(self._finished) - self.running)
        return max(free, 0)

    def start(self, count: int) -> range:
        """Numbers of the `count` groups that start now."""
        numbers = range(self.state.admitted, self.state.admitted + count)
        self.state.admitted += count
        self.running += count
        return numbers

    def finish(self, group: Group, accepted: bool) -> None:
        """A group has ended. Closes the batches that became complete or exhausted by it."""
        self.running -= 1
        self.state.counted += accepted
        self._finished[group.number] = TriedGroup(group, accepted)
        while self.state.released in self._finished:
            self.tried.append(self._finished.pop(self.state.released))
            self.state.released += 1
            self._close_if_due()

    def idle(self) -> bool:
        """Nothing runs and nothing may start: weights can be replaced."""
        return self.running == 0 and self.capacity() == 0

    def _close_if_due(self) -> None:
        missing = self.prompts_per_step - len(accepted_groups(self.tried))
        exhausted = self.max_attempts is not None and len(self.tried) >= self.max_attempts * self.prompts_per_step
        if missing and not exhausted:
            return
        self.closed.append(self.tried)
        self.state.counted += missing
        self.tried = []
