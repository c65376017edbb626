"""How many groups may be under way, which finish, and which make up the next batch: a pure state machine.

With weights of version v and staleness S, a group may start if its batch is at most batch v + S (batches
count from 0, and batch b trains version b). Which batch that will be is known only when everything before
it has finished, so the earliest possible course is taken: every running group is accepted. A group that
dynamic sampling filters fills no place in its batch, so another may start; nothing more is needed for
resampling. In the plain case this is the rule (S + v + 1) P - accepted - running for P prompts a step.

Groups are released in admission order, whatever order they finish in: batches are then not biased towards
short responses, and do not depend on timing. A batch is closed short when `max_attempts` times P groups
were tried for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megarl.types import Group


@dataclass
class AdmissionState:
    """The counters of a run."""

    admitted: int = 0  # groups ever started: also the next group's number and the data cursor
    released: int = 0  # the next group number to release
    closed: int = 0  # batches ever closed


@dataclass
class TriedGroup:
    """A group that has finished, and whether it may be trained on."""

    group: Group
    accepted: bool


def accepted_groups(tried: list[TriedGroup]) -> list[Group]:
    return [item.group for item in tried if item.accepted]


class Admission:
    """Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: int,
        max_attempts: int | None,
        continuous: bool,
        batches: int | None = None,
    ):
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.max_attempts = max_attempts  # None: nothing is filtered, nothing is bounded
        self.continuous = continuous
        self.batches = batches  # of the whole run: none is started beyond them; None: no end
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
        batch, accepted, tried = self.state.closed, len(accepted_groups(self.tried)), len(self.tried)
        for number in range(self.state.released, self.state.admitted):  # as if all that run were accepted
            accepted += number not in self._finished or self._finished[number].accepted
            tried += 1
            if self._places_left(accepted, tried) == 0:
                batch, accepted, tried = batch + 1, 0, 0
        last_batch = self.max_staleness + self.version
        if self.batches is not None:
            last_batch = min(last_batch, self.batches - 1)
        further_batches = last_batch - batch
        if further_batches < 0:
            return 0
        return self._places_left(accepted, tried) + further_batches * self.prompts_per_step

    def _places_left(self, accepted: int, tried: int) -> int:
        """Groups that a batch still takes if all of them are accepted."""
        places = self.prompts_per_step - accepted
        return places if self.max_attempts is None else min(places, self.max_attempts * self.prompts_per_step - tried)

    def start(self, count: int) -> range:
        """Numbers of the `count` groups that start now."""
        numbers = range(self.state.admitted, self.state.admitted + count)
        self.state.admitted += count
        self.running += count
        return numbers

    def finish(self, group: Group, accepted: bool) -> None:
        """A group has ended. Closes the batches that became complete or exhausted by it."""
        self.running -= 1
        self._finished[group.number] = TriedGroup(group, accepted)
        while self.state.released in self._finished:
            self.tried.append(self._finished.pop(self.state.released))
            self.state.released += 1
            self._close_if_due()

    def unfinished(self) -> list[int]:
        """Numbers of the groups that are under way, oldest first."""
        return [number for number in range(self.state.released, self.state.admitted) if number not in self._finished]

    def idle(self) -> bool:
        """Nothing runs and nothing may start: weights can be replaced."""
        return self.running == 0 and self.capacity() == 0

    def _close_if_due(self) -> None:
        if self._places_left(len(accepted_groups(self.tried)), len(self.tried)) == 0:
            self.closed.append(self.tried)
            self.state.closed += 1
            self.tried = []
