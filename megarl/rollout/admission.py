"""Admission of groups within `rollout.max_staleness` (`Admission.capacity`), and their assignment to batches: a pure state machine.

Batches count from 0, and batch b updates the policy from version b to b + 1. With weights of version v and staleness S, a
group may start if it will be in batch v + S or earlier. Its batch depends on how many earlier groups are accepted, so the
capacity assumes that every running group will be. If dynamic sampling filters a group, its place in the batch is free again
and another group may start; resampling needs no other rule. Without filtering, the capacity is
(S + v + 1) P - accepted - running for P prompts per step. S may be a fraction: with S = 1.5, half of a batch may start as well.

A finished group enters a batch (it is released) if it is the oldest unreleased group, or if fewer than W - 1 later groups
have overtaken the oldest one, with the window W. So at most W - 1 later groups overtake a group, and it is trained on by policies
of at most ceil(S) + ceil((W - 1) / P) versions after the one that it started with. With W = 1 groups enter batches in admission
order. Groups are never dropped, so batches are not biased towards short responses. After `max_attempts` times P tried groups, a
batch closes with fewer groups.

With over-sampling by a factor f, ceil(f places) groups start with each version where the capacity above has `places`, so that filtered
groups need no replacement that starts late. If an update waits for running groups (drain), more start before it only if the batch of
the newest weights would stay short. The number of started groups then depends on which groups are filtered, not on the order in
which they finish, and batches stay in admission order. With the other rules, which groups are trained depends on that order, too.
If fewer groups are filtered, the surplus enters the next batches, or is left out and counted (`unused`) where it would exceed the
largest lag, or after the last batch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from megarl.recipe.derived.at_update import whole_number
from megarl.types import Group


@dataclass
class AdmissionState:
    """Counters of a run."""

    admitted: int = 0  # started groups: also the next group's number and the data cursor
    closed: int = 0  # closed batches


@dataclass
class UnusedGroups:
    """Groups of over-sampling that no batch takes."""

    numbers: list[int] = field(default_factory=list)
    tokens: int = 0  # of the finished ones, prompts included

    @property
    def groups(self) -> int:
        return len(self.numbers)


@dataclass
class TriedGroup:
    """A finished group. `accepted`: it may be trained on."""

    group: Group
    accepted: bool


def accepted_groups(tried: list[TriedGroup]) -> list[Group]:
    return [item.group for item in tried if item.accepted]


def lost_among(batches: Iterable[Iterable[TriedGroup]]) -> list[int]:
    """Return the sorted numbers of groups whose vectors are lost."""
    groups = [item.group for batch in batches for item in batch]
    return sorted(group.number for group in groups if group.samples and group.samples[0].data.is_lost)


class Admission:
    """State machine of the module's docstring. Not thread-safe: the caller needs a lock."""

    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: float,
        max_attempts: int | None,
        continuous: bool,
        batches: int | None = None,
        window: int = 1,
        oversample: float = 1.0,
        drains: bool = True,
    ):
        assert oversample == 1.0 or max_attempts is not None, "only filtered groups need over-sampling"
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.max_attempts = max_attempts  # None: no filter and no limit
        self.continuous = continuous
        self.batches = batches  # batches of the whole run; None: unlimited
        self.window = window
        self.oversample = oversample  # groups that start for each place
        self.drains = drains  # an update of the weights waits for running groups; only read with over-sampling
        self.unused = UnusedGroups()  # since the last `take_unused`
        self._begun: int | None = None  # the newest version when groups started last
        self.state = AdmissionState()
        self.version: int | None = None  # of the engines' weights; None: no group may start
        self.running = 0
        self.tried: list[TriedGroup] = []  # groups of the current batch, filtered ones included
        self._accepted = 0  # of them, accepted: counted, because a batch may have thousands of groups
        self.closed: deque[list[TriedGroup]] = deque()  # batches ready for training
        self._unreleased: deque[int] = deque()  # numbers of running and waiting groups, oldest first; some are released
        self._released_early: set[int] = set()  # numbers in `_unreleased` that are released
        self._waiting: dict[int, TriedGroup] = {}  # by number: finished groups that are not released
        self._waiting_numbers: list[int] = []  # heap of their numbers
        self._rejected = 0  # of them, not accepted

    def capacity(self, version: int | None = None) -> int:
        """Return the number of groups that may start now, on an engine with weights of `version` (default: the newest)."""
        if self.version is None or (self.running and not self.continuous):
            return 0
        version = self.version if version is None else version
        whole = math.floor(self.max_staleness)
        last_batch, extra = version + whole, whole_number((self.max_staleness - whole) * self.prompts_per_step)
        if self.batches is not None and last_batch >= self.batches - 1:
            last_batch, extra = self.batches - 1, 0
        if self.oversample == 1.0:
            return self._places(last_batch, extra)[0]
        places, tries = self._places(last_batch, extra)
        if self.drains and self._begun == self.version:  # later starts would delay the next version
            places = min(places, self._places(min(self.version, last_batch), 0)[0])
        return max(0, min(math.ceil(self.oversample * places - 1e-9), tries))

    def _places(self, last_batch: int, extra: int) -> tuple[int, int]:
        """Return the free places until the end of `last_batch`, and of the first `extra` groups of the batch after it, and the groups
        that may be tried for them."""
        batch, accepted, tried = self._position()
        attempts = self.max_attempts or 1
        tries = max(0, ((last_batch - batch + 1) * self.prompts_per_step + extra) * attempts - tried)
        if batch > last_batch:  # of the batch after the last, only `extra` groups may start
            return max(0, self._places_left(accepted, tried, extra)) if batch == last_batch + 1 else 0, tries
        return self._places_left(accepted, tried) + (last_batch - batch) * self.prompts_per_step + extra, tries

    def _position(self) -> tuple[int, int, int]:
        """Return the batch of the next group, and the accepted and tried groups before it. Running groups count as accepted."""
        batch, accepted, tried = self.state.closed, self._accepted, len(self.tried)
        if self.max_attempts is None:  # the same in fewer operations
            left = len(self._unreleased) - len(self._released_early) - self._rejected
            full, accepted = divmod(accepted + left, self.prompts_per_step)
            return batch + full, accepted, tried
        size, most, waiting, early = (
            self.prompts_per_step,
            self.max_attempts * self.prompts_per_step,
            self._waiting,
            self._released_early,
        )
        if tried - accepted + self._rejected <= most - size:  # no batch can be exhausted
            full, left = divmod(accepted + len(self._unreleased) - len(early) - self._rejected, size)
            if full == 0:
                return batch, left, tried + len(self._unreleased) - len(early)
            return batch + full, left, self._tried_last(left)
        for number in self._unreleased:  # thousands: without calls
            if number not in early:
                item = waiting.get(number)
                accepted += item is None or item.accepted
                tried += 1
                if accepted == size or tried == most:
                    batch, accepted, tried = batch + 1, 0, 0
        return batch, accepted, tried

    def _tried_last(self, accepted: int) -> int:
        """Return the number of the newest running and waiting groups of which `accepted` count as accepted, and no older group of the
        same batch is: a batch ends with an accepted group."""
        tried = 0
        for number in reversed(self._unreleased):
            if number not in self._released_early:
                item = self._waiting.get(number)
                if item is None or item.accepted:
                    if not accepted:
                        break
                    accepted -= 1
                tried += 1
        return tried

    def _in_order(self) -> list[int]:
        """Return the numbers of running and waiting groups, oldest first."""
        return [number for number in self._unreleased if number not in self._released_early]

    def _places_left(self, accepted: int, tried: int, size: int | None = None) -> int:
        """Return the number of groups that the batch can still take if all of them are accepted. `size`: a part of it."""
        size = self.prompts_per_step if size is None else size
        return size - accepted if self.max_attempts is None else min(size - accepted, self.max_attempts * size - tried)

    def start(self, count: int) -> range:
        """Start `count` groups; return their numbers."""
        numbers = range(self.state.admitted, self.state.admitted + count)
        self._unreleased += numbers
        self._begun = self.version if count else self._begun
        self.state.admitted += count
        self.running += count
        return numbers

    def finish(self, group: Group, accepted: bool) -> None:
        """Record a finished group, release the finished groups that may be released, and close complete or exhausted batches."""
        self.running -= 1
        self._wait(TriedGroup(group, accepted))
        self._release_finished()

    def lost(self) -> list[int]:
        """Return the sorted numbers of finished groups whose vectors are lost."""
        return lost_among((*self.closed, self.tried, self._waiting.values()))

    def reopen(self, lost: Collection[int]) -> None:
        """Count the finished groups `lost` as running again. The first batch with one of them, and all later batches, are open again;
        their other groups wait."""
        batches = [*self.closed, self.tried]
        intact = list(itertools.takewhile(lambda batch: not any(item.group.number in lost for item in batch), batches))
        reopened = [item for batch in batches[len(intact) :] for item in batch]
        state = AdmissionState(self.state.admitted, self.state.closed - max(0, len(self.closed) - len(intact)))
        current = self.tried if len(intact) == len(batches) else []
        waiting = [item for item in [*reopened, *self.waiting()] if item.group.number not in lost]
        self.restore(state, [current, *intact[: len(self.closed)]], waiting, [*self.unfinished(), *lost])
        self.restart(len(lost))
        self._release_finished()

    def _release_finished(self) -> None:
        while (number := self._next_release()) is not None:
            self._released_early.add(heapq.heappop(self._waiting_numbers))
            while self._unreleased and self._unreleased[0] in self._released_early:
                self._released_early.remove(self._unreleased.popleft())
            released = self._waiting.pop(number)
            self._rejected -= not released.accepted
            if self.oversample > 1.0 and self._is_surplus(released.group):
                self.unused.numbers.append(released.group.number)
                self.unused.tokens += sum(sample.length for sample in released.group.samples)
                continue
            self.tried.append(released)
            self._accepted += released.accepted
            self._close_if_due()

    def _is_surplus(self, group: Group) -> bool:
        """Return whether the current batch may not take a finished group: it is too old, or the run has no such batch."""
        largest_lag = math.ceil(self.max_staleness) + -(-(self.window - 1) // self.prompts_per_step)
        oldest = min((sample.version for sample in group.samples), default=self.state.closed)
        after_last = self.batches is not None and self.state.closed >= self.batches
        return after_last or self.state.closed - oldest > largest_lag

    def take_unused(self) -> UnusedGroups:
        """Return the groups that no batch took since the last call. After the run's last batch these include the waiting groups and
        running groups, without their tokens: call it once then."""
        unused, self.unused = self.unused, UnusedGroups()
        if self.state.closed == self.batches and not self.closed:
            waiting = [item.group for item in self.waiting()]
            unused.numbers += [*self.unfinished(), *(group.number for group in waiting)]
            unused.tokens += sum(sample.length for group in waiting for sample in group.samples)
        return unused

    def _wait(self, item: TriedGroup) -> None:
        self._waiting[item.group.number] = item
        self._rejected += not item.accepted
        heapq.heappush(self._waiting_numbers, item.group.number)

    def _next_release(self) -> int | None:
        """Return the oldest finished group that may be released, if any."""
        if not self._waiting:
            return None
        number, oldest = self._waiting_numbers[0], self._unreleased[0]
        if number == oldest:
            return number
        released = self.state.admitted - len(self._unreleased) + len(self._released_early)
        overtaking = released - oldest  # all groups before the oldest unreleased one are released
        return number if overtaking < self.window - 1 else None

    def unfinished(self) -> list[int]:
        """Return the numbers of the running groups, oldest first."""
        return [number for number in self._in_order() if number not in self._waiting]

    def waiting(self) -> list[TriedGroup]:
        """Return the finished groups that are not released, oldest first."""
        return [self._waiting[number] for number in sorted(self._waiting)]

    def has_enough_finished(self) -> bool:
        """Return whether enough groups have finished for a batch, whether they are released or not."""
        accepted = self._accepted + len(self._waiting) - self._rejected
        return self._places_left(accepted, len(self.tried) + len(self._waiting)) <= 0

    def restore(
        self,
        state: AdmissionState,
        batches: list[list[TriedGroup]],
        waiting: list[TriedGroup],
        unfinished: list[int],
    ) -> None:
        """Restore a saved state. `batches`: the current one, then the closed ones. `unfinished`: groups that ran; they do not
        count as running until `restart`."""
        self.state = state
        self.tried, *closed = batches
        self._accepted = len(accepted_groups(self.tried))
        self.closed = deque(closed)
        self._waiting, self._waiting_numbers, self._rejected = {}, [], 0
        for item in waiting:
            self._wait(item)
        self._unreleased, self._released_early = deque(sorted([*unfinished, *self._waiting])), set()

    def restart(self, count: int) -> None:
        """Count `count` unfinished groups of a restored state as running again."""
        self.running += count

    def idle(self) -> bool:
        """Return True if no group runs and none may start."""
        return self.running == 0 and self.capacity() == 0

    def _close_if_due(self) -> None:
        if self._places_left(self._accepted, len(self.tried)) == 0:
            self.closed.append(self.tried)
            self.state.closed += 1
            self.tried, self._accepted = [], 0
