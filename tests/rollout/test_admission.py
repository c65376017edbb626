"""Admission: exactly one batch a version when synchronous, replacements for filtered groups, never too stale, repeatable."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.admission import Admission, TriedGroup, accepted_groups
from megarl.types import Group


def group(number: int) -> Group:
    return Group(number, f"row/{number}", "test", [])


def test_synchronous_admission_starts_one_batch_per_version() -> None:
    admission = Admission(4, 0, None, continuous=False)
    assert admission.capacity() == 0  # closed until a version is announced
    admission.version = 0
    assert list(admission.start(admission.capacity())) == [0, 1, 2, 3]
    assert admission.capacity() == 0
    for number in (2, 0, 3):
        admission.finish(group(number), True)
        assert not admission.closed
    admission.finish(group(1), True)
    assert [item.group.number for item in admission.closed.popleft()] == [0, 1, 2, 3]  # not in finishing order
    assert admission.idle()
    admission.version = 1
    assert list(admission.start(admission.capacity())) == [4, 5, 6, 7]


def test_one_step_off_starts_two_batches() -> None:
    admission = Admission(4, 1, None, continuous=False)
    admission.version = 0
    assert admission.capacity() == 8
    for number in admission.start(8):
        admission.finish(group(number), True)
    assert len(admission.closed) == 2 and admission.capacity() == 0
    admission.version = 1
    assert admission.capacity() == 4


def test_filtered_groups_are_replaced_in_waves() -> None:
    admission = Admission(4, 0, 3, continuous=False)
    admission.version = 0
    for number in admission.start(4):
        admission.finish(group(number), accepted=number == 1)
        if number < 3:
            assert admission.capacity() == 0  # the wave is still running
    assert admission.capacity() == 3
    for number in admission.start(3):
        admission.finish(group(number), True)
    batch = admission.closed.popleft()
    assert [item.group.number for item in accepted_groups_items(batch)] == [1, 4, 5, 6]
    assert len(batch) == 7


def accepted_groups_items(batch: list) -> list:
    return [item for item in batch if item.accepted]


def test_continuous_replaces_at_once() -> None:
    admission = Admission(4, 0, 3, continuous=True)
    admission.version = 0
    admission.start(4)
    admission.finish(group(2), accepted=False)
    assert admission.capacity() == 1


def test_exhausted_batch_closes_short_and_the_next_is_full() -> None:
    admission = Admission(4, 0, 2, continuous=False)
    admission.version = 0
    while not admission.closed:
        for number in admission.start(admission.capacity()):
            admission.finish(group(number), accepted=number == 5)
    batch = admission.closed.popleft()
    assert len(batch) == 8 and [accepted.number for accepted in accepted_groups(batch)] == [5]
    assert admission.idle()  # no further request may start for it
    admission.version = 1
    assert admission.capacity() == 4


def test_nothing_starts_beyond_the_last_batch() -> None:
    admission = Admission(4, 2, None, continuous=False, batches=2)
    admission.version = 0
    assert admission.capacity() == 8  # not the 12 that staleness 2 would allow
    admission.version = 1
    for number in admission.start(8):
        admission.finish(group(number), True)
    assert admission.capacity() == 0 and admission.idle()


@given(
    seed=st.integers(0, 10_000),
    prompts=st.integers(1, 6),
    staleness=st.integers(0, 3),
    attempts=st.sampled_from([None, 1, 2, 4]),
    continuous=st.booleans(),
)
def test_staleness_order_and_conservation(
    seed: int, prompts: int, staleness: int, attempts: int | None, continuous: bool
) -> None:
    """In any order of completion, no sample is too old, batches keep admission order, and no group is lost or repeated."""
    rng = random.Random(seed)
    admission = Admission(prompts, staleness, attempts, continuous)
    in_flight: list[Group] = []
    started: dict[int, int] = {}  # version at the start, by number
    seen: list[int] = []
    admission.version = 0

    def start(version: int) -> None:
        for number in admission.start(admission.capacity()):
            in_flight.append(group(number))
            started[number] = version

    for version in range(6):
        while not admission.closed:
            start(version)
            assert in_flight, "deadlock: nothing runs and nothing can start"
            done = in_flight.pop(rng.randrange(len(in_flight)))
            admission.finish(done, attempts is None or rng.random() < 0.5)
        batch = admission.closed.popleft()
        seen += [item.group.number for item in batch]
        assert len(accepted_groups(batch)) <= prompts
        assert all(version - started[accepted.number] <= staleness for accepted in accepted_groups(batch))
        while not admission.idle():  # drain before the next version
            start(version)
            if in_flight:
                admission.finish(in_flight.pop(rng.randrange(len(in_flight))), attempts is None or rng.random() < 0.5)
        admission.version = version + 1
    assert seen == list(range(len(seen)))


@given(
    seed=st.integers(0, 10_000),
    prompts=st.integers(1, 5),
    staleness=st.sampled_from([0, 0.5, 1, 1.7, 3]),
    window=st.integers(1, 12),
    attempts=st.sampled_from([None, 1, 2, 4]),
)
def test_lag_and_order_with_a_window(
    seed: int, prompts: int, staleness: float, window: int, attempts: int | None
) -> None:
    """Weights change while groups run. In any order of completion, the lag and the overtaking have their bounds, few groups
    are alive, and no group is lost or repeated."""
    rng = random.Random(seed)
    admission = Admission(prompts, staleness, attempts, continuous=True, window=window)
    started: dict[int, int] = {}  # version at the start, by number
    running: list[int] = []
    seen: list[int] = []
    stuck = rng.random() < 0.5  # the oldest group finishes only if nothing else can
    for version in range(8):
        admission.version = version
        while not admission.closed:
            for number in admission.start(admission.capacity()):
                started[number] = version
                running.append(number)
            assert running, "deadlock: nothing runs and nothing can start"
            later_numbers = [number for number in running if number != min(running)]
            number = (
                rng.choice(later_numbers) if stuck and later_numbers and rng.random() < 0.9 else rng.choice(running)
            )
            running.remove(number)
            admission.finish(group(number), attempts is None or rng.random() < 0.5)
            assert len(running) + len(admission.waiting()) <= (staleness + 1) * prompts * (attempts or 1)
            finished = [*admission.tried, *admission.waiting()]
            enough = len(accepted_groups(finished)) >= prompts or len(finished) >= prompts * (attempts or math.inf)
            assert admission.has_enough_finished() == enough, "the counts differ from the groups"
        batch = [item.group.number for item in admission.closed.popleft()]
        for number in batch:
            assert version - started[number] <= math.ceil(staleness) + -(-(window - 1) // prompts)
            assert len(seen) - number < window and number - len(seen) < (staleness + 1) * prompts * (attempts or 1)
            seen.append(number)
    kept = sorted([*seen, *(item.group.number for item in admission.tried)])
    kept += [item.group.number for closed in admission.closed for item in closed]
    kept += [*running, *(item.group.number for item in admission.waiting())]
    assert sorted(kept) == list(range(admission.state.admitted))


def test_a_restored_admission_continues_with_the_same_groups() -> None:
    first = Admission(2, 2, None, continuous=True, window=3)
    first.version = 0
    first.start(first.capacity())
    for number in (1, 4, 2):
        first.finish(group(number), True)
    assert [item.group.number for item in first.closed[0]] == [1, 4]
    second = Admission(2, 2, None, continuous=True, window=3)
    batches = [list(first.tried), *first.closed]
    second.restore(replace(first.state), batches, first.waiting(), first.unfinished())
    assert second.unfinished() == [0, 3, 5] and second.running == 0
    second.restart(3)
    for admission in (first, second):
        admission.version = 1
        assert list(admission.start(admission.capacity())) == [6, 7]
        for number in (0, 3, 5):
            admission.finish(group(number), True)
        assert [[item.group.number for item in batch] for batch in admission.closed] == [[1, 4], [0, 2], [3, 5]]


def test_a_fraction_of_a_batch_may_start() -> None:
    """Equal to verl's `staleness_threshold`: (1 + 0.5) x 4 groups after each update."""
    admission = Admission(4, 0.5, None, continuous=True, batches=3)
    admission.version = 0
    assert list(admission.start(admission.capacity())) == [0, 1, 2, 3, 4, 5]
    assert admission.capacity() == 0
    for number in range(5):
        admission.finish(group(number), True)
    assert len(admission.closed) == 1 and admission.capacity() == 0
    admission.version = 1
    assert list(admission.start(admission.capacity())) == [6, 7, 8, 9]
    admission.version = 2
    assert list(admission.start(admission.capacity())) == [10, 11], "the last batch has no successor"


def test_a_release_reads_no_earlier_group_again() -> None:
    """The time of a batch is linear in its groups: batches have thousands of groups."""

    class Counted(TriedGroup):
        reads = 0

        def __getattribute__(self, name: str) -> object:
            Counted.reads += name == "accepted"
            return super().__getattribute__(name)

    admission = Admission(100, 1, None, continuous=True)
    admission.version = 0
    admission.start(admission.capacity())
    admission.restore(admission.state, [[Counted(group(number), True) for number in range(60)]], [], [*range(60, 200)])
    admission.restart(140)
    Counted.reads = 0
    for number in range(60, 99):
        admission.finish(group(number), True)
        assert not admission.has_enough_finished() and admission.capacity() == 0
    assert Counted.reads == 0
    admission.finish(group(99), True)
    assert len(admission.closed) == 1
