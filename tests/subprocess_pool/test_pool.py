"""Processes for whatever may hang or crash, not only scorers (which tests/rewards/test_scoring.py looks at)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megarl.subprocess_pool.job import Answered, Failed
from megarl.subprocess_pool.pool import ProcessPool

NAMES = ["told", "refuses", "size", "sleeps", "unreadable", "lock", "big", "fills"]


@pytest.fixture
def make() -> Iterator[Callable[..., ProcessPool]]:
    made: list[ProcessPool] = []

    def start(names: list[str] = NAMES, **options: Any) -> ProcessPool:
        options = {"processes": 1, "timeout": 5.0, "retries": 0, "timeout_key": "agent.tool_timeout", **options}
        made.append(ProcessPool("tests.support.pool_jobs:find", names, {"depth": [1, 2]}, **options))
        made[-1].start()
        return made[-1]

    yield start
    for pool in made:
        pool.close()


def test_names_and_settings_reach_the_work(make: Callable[..., ProcessPool]) -> None:
    """And it is prepared once, in the process that the others are forked from."""
    pool = make(processes=2)
    found = [pool.submit("told", {"x": number}).result(10) for number in range(8)]
    for number, outcome in enumerate(found):
        assert isinstance(outcome, Answered) and outcome.retries == 0
        assert outcome.value.pop("own") != pool._fork_server.pid
        expected = {"name": "told", "settings": {"depth": [1, 2]}, "request": {"x": number}}
        assert outcome.value == {**expected, "prepared": [pool._fork_server.pid]}


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("refuses", "no cake here"),  # CallError's cause is all that is said
        ("lock", "its answer cannot be pickled: TypeError: cannot pickle '_thread.lock' object"),
        ("unreadable", "its answer cannot be read: ValueError: invalid literal for int() with base 10: 'nothing'"),
    ],
)
def test_what_cannot_be_answered_costs_its_own_call(make: Callable[..., ProcessPool], name: str, cause: str) -> None:
    pool = make(retries=1)
    outcome, after = (pool.submit(*call).result(10) for call in ((name, "cake"), ("size", b"four")))
    assert isinstance(outcome, Failed) and (outcome.kind, outcome.cause, outcome.attempts) == ("error", cause, 2)
    assert isinstance(after, Answered) and after.value == 4
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.submit("size", threading.Lock())


def test_a_call_may_have_less_time_than_the_pool(make: Callable[..., ProcessPool]) -> None:
    """The key is named where it is the key's limit that was reached. A call's own limit is never past the pool's."""
    pool = make(processes=3, timeout=0.6)
    waiting = [pool.submit("sleeps", 100.0, timeout) for timeout in (0.2, None, 50.0)]
    short, *rest = [future.result(10) for future in waiting]
    assert isinstance(short, Failed) and (short.kind, short.cause) == ("timeout", "it ran for longer than 0.2 s")
    assert 0.2 <= short.seconds < 0.6
    for outcome in rest:
        assert isinstance(outcome, Failed) and outcome.seconds >= 0.6
        assert outcome.cause == "it ran for longer than 0.6 s (agent.tool_timeout)"
    answered = pool.submit("sleeps", 0.1).result(10)
    assert isinstance(answered, Answered) and 0.1 <= answered.seconds < 0.6


def test_messages_larger_than_a_socket_takes(make: Callable[..., ProcessPool]) -> None:
    """Both ways, and behind a call that hangs: what the process does not read holds up nobody."""
    pool, megabytes = make(processes=2, timeout=2.0), 3 << 20
    there = [pool.submit("size", bytes(megabytes)) for _ in range(20)]
    back = [pool.submit("big", megabytes) for _ in range(20)]
    for future in there:
        outcome = future.result(20)
        assert isinstance(outcome, Answered) and outcome.value == megabytes
    for future in back:
        outcome = future.result(20)
        assert isinstance(outcome, Answered) and len(outcome.value) == megabytes
    hanging = pool.submit("sleeps", 100.0)
    others = [pool.submit("size", bytes(megabytes)).result(1.5) for _ in range(5)]
    assert all(isinstance(outcome, Answered) for outcome in others)
    assert isinstance(hanging.result(10), Failed)


def test_memory_is_limited_in_each_process(make: Callable[..., ProcessPool]) -> None:
    """Past the limit a call fails alone; below it all is as before. What reserves address space without using it, as a
    limit of that would not let pass, is no harm."""
    pool = make(memory_mb=600)
    less, more, after = (pool.submit("fills", megabytes).result(10) for megabytes in (300, 700, 300))
    assert isinstance(less, Answered) and isinstance(after, Answered) and less.value == after.value == 300
    assert isinstance(more, Failed) and more.kind == "error" and "Unable to allocate 700. MiB" in more.cause
    with pytest.raises(RuntimeError, match=r"memory_mb is 5, but imports alone take \d+ MiB"):
        make(memory_mb=5)


def test_async_functions_many_at_a_time(make: Callable[..., ProcessPool]) -> None:
    """200 calls that wait for 0.2 s each, in two processes with 64 at a time: shared out evenly, and 20 s of waiting in
    four turns of 0.2 s."""
    pool = make(["awaits"], processes=2, concurrent=64)
    found = [future.result(20) for future in [pool.submit("awaits", {}) for _ in range(200)]]
    values = [outcome.value for outcome in found if isinstance(outcome, Answered)]
    assert len(values) == 200
    most: dict[int, int] = {}
    for value in values:
        most[value["own"]] = max(most.get(value["own"], 0), value["most"])
    assert len(most) == 2 and all(60 <= number <= 64 for number in most.values()), most


def test_an_async_call_has_its_time_from_when_it_begins(make: Callable[..., ProcessPool]) -> None:
    """Twelve calls of 0.3 s, three at a time, with a limit of 0.8 s: the last waits for 0.9 s."""
    pool = make(["awaits"], processes=1, concurrent=3, timeout=0.8)
    found = [future.result(20) for future in [pool.submit("awaits", {"seconds": 0.3}) for _ in range(12)]]
    assert all(isinstance(outcome, Answered) and outcome.value["most"] <= 3 for outcome in found), found


def test_an_async_call_past_its_time_is_cancelled_alone(make: Callable[..., ProcessPool]) -> None:
    """The process goes on, with what else it has under way."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=1.0, retries=1)
    hanging, short, *others = [
        pool.submit("awaits", {"seconds": 1000.0}),
        pool.submit("awaits", {"seconds": 1000.0}, 0.2),
        *(pool.submit("awaits", {"seconds": 0.8}) for _ in range(6)),
    ]
    values = [outcome.value for other in others if isinstance(outcome := other.result(10), Answered)]
    first, second = hanging.result(10), short.result(10)
    assert isinstance(first, Failed) and isinstance(second, Failed)
    assert (first.kind, first.cause, first.attempts) == (
        "timeout",
        "it ran for longer than 1 s (agent.tool_timeout)",
        2,
    )
    assert second.cause == "it ran for longer than 0.2 s" and 0.2 <= second.seconds < 1
    after = pool.submit("awaits", {"seconds": 0.0}).result(10)
    assert isinstance(after, Answered)
    assert {value["own"] for value in values} == {after.value["own"]} and len(values) == 6


@pytest.mark.parametrize("what", ["block", "compute", "child blocks"])
def test_an_async_call_that_blocks_is_blamed_alone(make: Callable[..., ProcessPool], what: str) -> None:
    """Its process answers no more and is killed; the calls beside it, whose time is up as well, have another chance that
    does not count."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=1.0)
    beside = [pool.submit("awaits", {"seconds": 0.9}) for _ in range(3)]
    blocks = pool.submit("awaits", {"seconds": 0.1, "what": what})
    behind = [pool.submit("awaits", {"seconds": 0.1}) for _ in range(20)]
    outcome = blocks.result(20)
    assert isinstance(outcome, Failed) and outcome.kind == "timeout" and outcome.seconds >= 1
    assert outcome.cause == "it ran for longer than 1 s (agent.tool_timeout)"
    for other in (*beside, *behind):
        found = other.result(20)
        assert isinstance(found, Answered) and found.retries == 0, found


def test_who_blocks_others_before_its_own_time_is_up_is_told_so(make: Callable[..., ProcessPool]) -> None:
    """The call beside it began earlier: its time is up first, and it is not to blame."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=4.0)
    beside = pool.submit("awaits", {"seconds": 0.4}, 0.5)
    blocks = pool.submit("awaits", {"seconds": 0.1, "what": "block"})
    outcome, other = blocks.result(20), beside.result(20)
    assert isinstance(other, Answered) and other.retries == 0
    assert isinstance(outcome, Failed) and outcome.kind == "timeout" and 1.5 <= outcome.seconds < 4
    assert outcome.cause.startswith("it blocked its process for 1.")


@pytest.mark.parametrize(
    ("what", "kind", "cause"),
    [
        ("cancelled", "error", "it raised CancelledError: "),
        ("leave", "error", "it raised SystemExit: 4"),
        ("child leaves", "error", "it raised SystemExit: 4"),
        ("exit", "crash", "its process ended with exit status 3"),
        ("stubborn", "timeout", "it ran for longer than 1 s (agent.tool_timeout)"),
    ],
)
def test_how_an_async_call_fails(make: Callable[..., ProcessPool], what: str, kind: str, cause: str) -> None:
    """With others under way in its process, whose outcome is their own."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=1.0)
    beside = [pool.submit("awaits", {"seconds": 0.3}) for _ in range(3)]
    outcome = pool.submit("awaits", {"seconds": 0.1, "what": what}).result(20)
    assert isinstance(outcome, Failed) and (outcome.kind, outcome.cause) == (kind, cause)
    for other in beside:
        found = other.result(20)
        assert isinstance(found, Answered) and found.retries == 0
