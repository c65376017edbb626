"""Every order of events of small runs: groups finish in any order, some are filtered, the samples of some are lost, and the run is
killed once at any moment and resumed."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from megarl.rollout.admission import Admission, AdmissionState, TriedGroup
from megarl.types import Group


@dataclass
class SmallRun:
    """A run of `batches` steps around an admission. It saves after each step, as with `train.save_every: 1`.

    rejections: groups that may still be filtered. losses: times that the samples of finished groups may still be lost.
    """

    batches: int
    prompts: int
    staleness: int
    window: int
    rejections: int = 0
    max_attempts: int | None = None
    losses: int = 0
    admission: Admission = field(init=False)
    started: dict[int, int] = field(default_factory=dict)  # group -> version of its start
    running: frozenset[int] = frozenset()
    filtered: frozenset[int] = frozenset()
    released: tuple[int, ...] = ()  # groups of the taken batches, in order, with the filtered ones
    version: int = 0
    saved: SmallRun | None = None
    killed: bool = False

    def __post_init__(self) -> None:
        self.admission = Admission(self.prompts, self.staleness, self.max_attempts, True, self.batches, self.window)
        self.admission.version = 0

    def start_groups(self) -> None:
        for number in self.admission.start(self.admission.capacity()):
            self.started[number] = self.version
            self.running |= {number}

    @property
    def trained(self) -> list[int]:
        return [number for number in self.released if number not in self.filtered]

    def finish(self, number: int, accepted: bool) -> None:
        self.running -= {number}
        if not accepted:
            self.rejections -= 1
            self.filtered |= {number}
        self.admission.finish(Group(number, "", "", []), accepted)
        self.start_groups()

    def finished(self) -> list[int]:
        """Accepted groups that are not trained on yet."""
        admission = self.admission
        items = [item for part in (*admission.closed, admission.tried, admission.waiting()) for item in part]
        return [item.group.number for item in items if item.accepted]

    def lose(self, *numbers: int) -> None:
        """Lose the samples of finished groups, which are sampled again at once."""
        self.losses -= 1
        self.admission.reopen(numbers)
        self.running |= {*numbers}
        self.started |= dict.fromkeys(numbers, self.version)
        self.start_groups()

    def train(self) -> None:
        batch = [item.group.number for item in self.admission.closed.popleft()]
        bound = self.staleness + math.ceil((self.window - 1) / self.prompts)
        assert all(self.version - self.started[number] <= bound for number in batch), "a group is too stale"
        self.released += tuple(batch)
        self.version += 1
        self.saved = None
        self.saved = copy.deepcopy(self)
        self.admission.version = self.version
        self.start_groups()

    def kill_and_resume(self) -> SmallRun:
        """Return the run that resumes from the last save, or starts again: running groups are sampled again."""
        resumed = SmallRun(self.batches, self.prompts, self.staleness, self.window, self.rejections, self.max_attempts)
        resumed.killed = True
        if self.saved is not None:
            saved = self.saved.admission
            unfinished = saved.unfinished()
            resumed.released, resumed.started = self.saved.released, dict(self.saved.started)
            resumed.version, resumed.filtered = self.saved.version, self.saved.filtered
            batches = [list(saved.tried), *map(list, saved.closed)]
            waiting = [TriedGroup(item.group, item.accepted) for item in saved.waiting()]
            resumed.admission.restore(
                AdmissionState(saved.state.admitted, saved.state.closed), batches, waiting, unfinished
            )
            resumed.saved = copy.deepcopy(self.saved)
            resumed.admission.version = resumed.version
            resumed.running = frozenset(unfinished)
            resumed.started |= dict.fromkeys(unfinished, resumed.version)
            resumed.admission.restart(len(unfinished))
        resumed.start_groups()
        return resumed

    def key(self) -> Any:
        admission = self.admission
        ages = tuple(sorted((number, self.started[number]) for number in set(self.started) - set(self.released)))
        gathered = (
            tuple(item.group.number for item in admission.tried),
            tuple(tuple(item.group.number for item in batch) for batch in admission.closed),
        )
        saved = None if self.saved is None or self.killed else self.saved.key()
        left = self.rejections, self.losses
        return self.released, self.filtered, left, self.running, gathered, ages, self.killed, saved


def check(run: SmallRun) -> None:
    alive = len(set(run.started) - set(run.released) - run.filtered)
    assert alive <= (run.staleness + 1) * run.prompts, "too many groups are alive"
    assert len(set(run.released)) == len(run.released), "a group was trained on twice"
    for place, number in enumerate(run.released):
        overtaking = sum(later > number for later in run.released[:place])
        assert overtaking < run.window, "too many groups overtook a group"


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(
    ("prompts", "batches"),
    [(1, 3), (2, 3), (3, 2), pytest.param(3, 3, marks=[pytest.mark.slow(reason="minutes"), pytest.mark.timeout(1800)])],
)
def test_every_order_of_events(prompts: int, batches: int, staleness: int, window: int) -> None:
    explore(SmallRun(batches, prompts, staleness, window))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("prompts", "batches", "rejections", "max_attempts"), [(1, 2, 2, None), (2, 2, 1, None), (1, 2, 2, 2)]
)
def test_every_order_of_events_with_filtered_groups(
    prompts: int, batches: int, rejections: int, max_attempts: int | None, staleness: int, window: int
) -> None:
    """With two attempts, a batch of one group may close without it."""
    explore(SmallRun(batches, prompts, staleness, window, rejections, max_attempts))


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(("prompts", "batches", "rejections"), [(1, 3, 0), (2, 2, 0), (1, 2, 1)])
def test_every_order_of_events_with_lost_samples(
    prompts: int, batches: int, rejections: int, staleness: int, window: int
) -> None:
    """One group is lost, or all that have finished."""
    first = SmallRun(batches, prompts, staleness, window, rejections, losses=1)
    first.killed = True
    explore(first)


def explore(first: SmallRun) -> None:
    batches, prompts = first.batches, first.prompts
    first.start_groups()
    states, seen, ended = [first], set(), 0
    while states:
        run = states.pop()
        key = run.key()
        if key in seen:
            continue
        seen.add(key)
        check(run)
        if run.version == batches:
            assert sorted(run.released) == list(range(len(run.started))), "a group was lost"
            assert run.max_attempts or len(run.trained) == batches * prompts, "a batch is too small"
            ended += 1
            continue
        following = []
        for number, accepted in itertools.product(run.running, (True, False) if run.rejections else (True,)):
            following.append(copy.deepcopy(run))
            following[-1].finish(number, accepted)
        if run.admission.closed:
            following.append(copy.deepcopy(run))
            following[-1].train()
        if run.losses and (finished := run.finished()):
            for lost in {*((number,) for number in finished), tuple(finished)}:
                following.append(copy.deepcopy(run))
                following[-1].lose(*lost)
        assert following, "nothing can happen any more"
        if not run.killed:
            following.append(run.kill_and_resume())
        states += following
    assert ended
