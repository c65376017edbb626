"""Waiting times of trainers and engines, with a clock that the test sets."""

from __future__ import annotations

import pytest

from megarl.rollout.admission import Admission
from megarl.rollout.waiting import Waiting
from megarl.types import Group


def test_seconds_are_counted_for_the_state_before_a_change() -> None:
    now = 0.0
    waiting = Waiting(4, lambda: now)
    waiting.observe(2, "engines")
    now = 3.0
    waiting.observe(1, "window")
    now = 5.0
    waiting.observe(0, None)
    now = 10.0
    assert waiting.metrics() == {
        "rollout/engines_idle": pytest.approx((3 * 2 + 2 * 1) / (10 * 4)),
        "rollout/wait_seconds/engines": 3.0,
        "rollout/wait_seconds/scorers": 0.0,
        "rollout/wait_seconds/window": 2.0,
    }
    now = 12.0
    assert waiting.metrics() == {
        "rollout/engines_idle": 0.0,
        "rollout/wait_seconds/engines": 0.0,
        "rollout/wait_seconds/scorers": 0.0,
        "rollout/wait_seconds/window": 0.0,
    }


def test_the_end_of_a_wait_belongs_to_the_scorers_of_the_group_that_ends_it() -> None:
    now = 0.0
    waiting = Waiting(1, lambda: now)
    waiting.observe(0, "engines")
    now = 10.0
    waiting.observe(0, "engines", scoring=4.0)  # sampled for 6 more seconds, then scored
    now = 13.0
    waiting.observe(0, "window", scoring=8.0)  # scored already before the last arrival
    now = 15.0
    waiting.observe(0, None, scoring=1.0)  # the trainers waited for the order, not for scores
    seconds = waiting.metrics()
    assert [seconds[f"rollout/wait_seconds/{reason}"] for reason in ("engines", "scorers", "window")] == [6.0, 7.0, 2.0]


def test_a_batch_waits_for_the_window_if_enough_groups_have_finished() -> None:
    admission = Admission(2, max_staleness=2, max_attempts=None, continuous=True, window=2)
    admission.version = 0
    admission.start(admission.capacity())
    for number in (2, 3):  # group 0, the oldest, runs, and one group may overtake it
        assert not admission.has_enough_finished()
        admission.finish(Group(number, "", "", []), accepted=True)
    assert admission.has_enough_finished() and not admission.closed
    admission.finish(Group(0, "", "", []), accepted=True)
    admission.finish(Group(1, "", "", []), accepted=True)
    assert admission.closed
