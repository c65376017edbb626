"""The state of one service: cases by hand, and properties over all orders of calls and probes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.outages import LONGEST_WAIT, ROWS, Outage, OutageState, wait_before


def test_one_failing_row_is_no_outage_however_often_it_fails() -> None:
    state = OutageState()
    for second in range(100):
        state.fail("row/1", "503", second - 1.0, float(second))
    assert not state.is_down and state.outage("judge", 100.0) is None


def test_two_rows_without_an_answer_in_between_are_an_outage() -> None:
    state = OutageState()
    state.fail("row/1", "refused", 9.0, 10.0)
    state.answer(11.0)
    state.fail("row/2", "refused", 11.0, 12.0)
    assert not state.is_down
    state.fail("row/3", "reset", 11.0, 15.0)
    assert state.outage("judge", 20.0) == Outage("judge", 8.0, "reset")
    state.answer(21.0)
    assert state.outage("judge", 22.0) is None


def test_with_a_probe_only_the_probe_decides() -> None:
    state = OutageState()
    for row in ("row/1", "row/2", "row/3"):
        state.fail(row, "500", 9.0, 10.0, has_probe=True)
    assert not state.is_down
    state.fail_probe("500 again", 10.0, 12.0)
    assert state.outage("judge", 12.0) == Outage("judge", 2.0, "500 again")


def test_a_probe_that_fails_while_a_call_is_answered_proves_nothing() -> None:
    state = OutageState()
    state.fail("row/1", "500", 9.0, 10.0, has_probe=True)
    state.answer(11.0)
    state.fail_probe("500", 10.5, 12.0)
    assert not state.is_down


def test_a_service_that_asks_for_a_wait_is_down_unless_it_answers_others() -> None:
    state = OutageState()
    state.answer(9.5)
    state.fail("row/1", "429", 9.0, 10.0, after=60.0)
    assert not state.is_down, "it has answered a call since this one began"
    state.fail("row/1", "429", 10.0, 11.0, after=60.0)
    assert state.is_down and state.seconds_to_probe(11.0) == 60.0


def test_waits_between_probes_grow_to_a_limit() -> None:
    state, now, waits = OutageState(), 0.0, []
    state.fail_probe("down", 0.0, now)
    for _ in range(1100):  # 2^1100 exceeds the largest float
        waits.append(state.seconds_to_probe(now))
        now += waits[-1]
        state.begin_probe(now)
    assert waits[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0] and set(waits[6:]) == {LONGEST_WAIT} == {wait_before(5000)}


# ---- properties


@dataclass(frozen=True)
class Event:
    kind: Literal["answer", "fail", "probe_answers", "probe_fails"]
    row: int
    seconds: float  # since the event before
    after: float


EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(["answer", "fail", "fail", "fail", "probe_answers", "probe_fails"]),
        st.integers(0, 3),
        st.sampled_from([0.25, 1.0, 7.0]),
        st.sampled_from([0.0, 0.0, 0.0, 20.0]),
    ),
    max_size=40,
)


@given(EVENTS, st.booleans())
def test_a_service_is_down_exactly_if_the_events_since_its_last_answer_say_so(
    events: list[Event], has_probe: bool
) -> None:
    """Against a definition that reads the whole history: calls are instant here, so each begins after all before it."""
    state, now, history = OutageState(), 0.0, list[tuple[float, Event]]()
    for event in events:
        now += event.seconds
        if event.kind.startswith("probe") and not has_probe:
            continue
        history.append((now, event))
        if event.kind == "fail":
            state.fail(f"row/{event.row}", str(event), now - 0.125, now, after=event.after, has_probe=has_probe)
        elif event.kind == "probe_fails":
            state.fail_probe(str(event), now - 0.125, now)
        else:
            state.answer(now)
        since_answer = list(
            itertools.takewhile(lambda item: item[1].kind in ("fail", "probe_fails"), reversed(history))
        )
        failed = [event for _, event in since_answer if event.kind == "fail"]
        down = any(event.kind == "probe_fails" or event.after for _, event in since_answer)
        down |= not has_probe and len({event.row for event in failed}) >= ROWS
        assert state.is_down == down
        outage = state.outage("it", now)
        assert (outage is not None) == down
        if outage is not None:
            first, kind = since_answer[-1][0], since_answer[-1][1].kind
            began = first - (0.125 if kind == "probe_fails" else 0.0)
            assert outage.seconds == pytest.approx(now - began) and outage.cause == str(history[-1][1])
            assert 0 <= state.seconds_to_probe(now) <= max(LONGEST_WAIT, 20.0)


@given(st.floats(1.0, 1e5), st.lists(st.floats(0.0, 100.0), max_size=200))
def test_an_outage_is_noticed_as_over_within_its_own_length(length: float, work: list[float]) -> None:
    """However long each probe takes, the next one comes soon: at most one wait after the service is back."""
    state, now, seconds = OutageState(), 0.0, iter(work)
    state.fail_probe("down", 0.0, now)
    probes = 0
    while now < length:
        wait = state.seconds_to_probe(now)
        assert wait <= min(LONGEST_WAIT, now + 1.0) + 1e-6
        now += wait
        state.begin_probe(now)
        now += next(seconds, 0.0)
        probes += 1
    assert probes <= math.log2(LONGEST_WAIT) + 2 + length / LONGEST_WAIT
