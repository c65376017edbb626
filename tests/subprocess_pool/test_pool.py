"""The process pool for calls that may hang or crash; tests/rewards/test_scoring.py tests it with scorers."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megarl.subprocess_pool.fork_server import PACKET
from megarl.subprocess_pool.job import Answered, Failed
from megarl.subprocess_pool.limits import raise_open_files
from megarl.subprocess_pool.pool import FORK_SERVER, ProcessPool
from megarl.subprocess_pool.process import SEAT_ENDED, Seat

NAMES = ["told", "refuses", "size", "sleeps", "unreadable", "lock", "big", "fills"]


@pytest.fixture
def make() -> Iterator[Callable[..., ProcessPool]]:
    pools: list[ProcessPool] = []

    def start(names: list[str] = NAMES, **options: Any) -> ProcessPool:
        options = {"processes": 1, "timeout": 5.0, "retries": 0, "timeout_key": "agent.tool_timeout", **options}
        pools.append(ProcessPool("tests.support.pool_jobs:find", names, {"depth": [1, 2]}, **options))
        pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def test_names_and_settings_reach_the_job(make: Callable[..., ProcessPool]) -> None:
    """The job is prepared once, in the fork server."""
    pool = make(processes=2)
    outcomes = [pool.submit("told", {"x": number}).result(10) for number in range(8)]
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Answered) and outcome.retries == 0
        assert outcome.value.pop("own") != pool._fork_server.pid
        expected = {"name": "told", "settings": {"depth": [1, 2]}, "request": {"x": number}}
        assert outcome.value == {**expected, "prepared": [pool._fork_server.pid]}


@pytest.mark.parametrize("concurrent", [1, 8])
def test_output_of_a_job_is_not_lost(
    make: Callable[..., ProcessPool],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    concurrent: int,
) -> None:
    """Workers end without Python's clean-up: `close` kills them."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    name = "prints" if concurrent == 1 else "awaits"
    pool = make([name], concurrent=concurrent)
    request = "scored" if concurrent == 1 else {"seconds": 0.0, "what": "print"}
    assert isinstance(pool.submit(name, request).result(10), Answered)
    pool.close()
    assert capfd.readouterr().out == "scored\n"


@contextlib.contextmanager
def fork_server(setup: list[Any]) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", FORK_SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        ours.send(json.dumps(setup).encode())
        assert ours.recv(PACKET) == b'["ready"]'
        yield ours, process
    finally:
        ours.close()
        process.kill()
        process.communicate()


def test_a_worker_that_cannot_start_prints_the_error() -> None:
    """Its exit status is 1; it is 0 after the pool has closed its end."""
    with fork_server(["tests.support.pool_jobs:find", ["size"], {}, None]) as (control, process):
        with open("/dev/null", "rb") as no_socket:
            socket.send_fds(control, [b'["fork", 3]'], [no_socket.fileno()])
        assert json.loads(control.recv(PACKET)) == ["ended", 3, 1]
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b'["fork", 4]'], [theirs.fileno()])
        assert ours.recv(1)  # it is ready
        ours.close()
        assert json.loads(control.recv(PACKET)) == ["ended", 4, 0]
        control.close()
        printed, _ = process.communicate(timeout=60)
    assert printed.startswith("Traceback") and "Socket operation on non-socket" in printed


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("refuses", "no cake here"),  # the message of a CallError has only its cause
        ("lock", "its answer cannot be pickled: TypeError: cannot pickle '_thread.lock' object"),
        ("unreadable", "its answer cannot be read: ValueError: invalid literal for int() with base 10: 'nothing'"),
    ],
)
def test_an_answer_that_cannot_be_sent_fails_only_its_call(
    make: Callable[..., ProcessPool], name: str, cause: str
) -> None:
    pool = make(retries=1)
    outcome, after = (pool.submit(*call).result(10) for call in ((name, "cake"), ("size", b"four")))
    assert isinstance(outcome, Failed) and (outcome.kind, outcome.cause, outcome.attempts) == ("error", cause, 2)
    assert isinstance(after, Answered) and after.value == 4
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.submit("size", threading.Lock())


def test_a_calls_limit_can_be_shorter_than_the_pools(make: Callable[..., ProcessPool]) -> None:
    """The message names the recipe key if the pool's limit was reached. A call's limit cannot exceed the pool's."""
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


def test_large_messages_arrive_and_block_no_other_call(make: Callable[..., ProcessPool]) -> None:
    """Large requests and answers arrive, also while another call hangs: a process that does not read blocks no other call."""
    pool, megabytes = make(processes=2, timeout=2.0), 3 << 20
    requests = [pool.submit("size", bytes(megabytes)) for _ in range(20)]
    back = [pool.submit("big", megabytes) for _ in range(20)]
    for future in requests:
        outcome = future.result(20)
        assert isinstance(outcome, Answered) and outcome.value == megabytes
    for future in back:
        outcome = future.result(20)
        assert isinstance(outcome, Answered) and len(outcome.value) == megabytes
    hanging = pool.submit("sleeps", 100.0)
    later = [pool.submit("size", bytes(megabytes)).result(1.5) for _ in range(5)]
    assert all(isinstance(outcome, Answered) for outcome in later)
    assert isinstance(hanging.result(10), Failed)


def test_memory_is_limited_in_each_process(make: Callable[..., ProcessPool]) -> None:
    """A call above the limit fails, and calls below it succeed before and after. Reserved but unused address space does not
    count."""
    pool = make(memory_mb=600)
    less, more, after = (pool.submit("fills", megabytes).result(10) for megabytes in (300, 700, 300))
    assert isinstance(less, Answered) and isinstance(after, Answered) and less.value == after.value == 300
    assert isinstance(more, Failed) and more.kind == "error" and "Unable to allocate 700. MiB" in more.cause
    with pytest.raises(RuntimeError, match=r"memory_mb is 5, but imports alone take \d+ MiB"):
        make(memory_mb=5)


def test_async_calls_run_concurrently_in_all_processes(make: Callable[..., ProcessPool]) -> None:
    """200 calls of 0.2 s each, in two processes with 64 at a time: distributed evenly."""
    pool = make(["awaits"], processes=2, concurrent=64)
    outcomes = [future.result(20) for future in [pool.submit("awaits", {}) for _ in range(200)]]
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Answered)]
    assert len(values) == 200
    most: dict[int, int] = {}
    for value in values:
        most[value["own"]] = max(most.get(value["own"], 0), value["most"])
    assert len(most) == 2 and all(60 <= number <= 64 for number in most.values()), most


def test_an_async_calls_limit_starts_when_it_begins(make: Callable[..., ProcessPool]) -> None:
    """Twelve calls of 0.3 s, three at a time, with a limit of 0.8 s: 0.9 s in the queue do not count."""
    pool = make(["awaits"], processes=1, concurrent=3, timeout=0.8)
    outcomes = [future.result(20) for future in [pool.submit("awaits", {"seconds": 0.3}) for _ in range(12)]]
    assert all(isinstance(outcome, Answered) and outcome.value["most"] <= 3 for outcome in outcomes), outcomes


def test_only_the_async_call_past_its_limit_is_cancelled(make: Callable[..., ProcessPool]) -> None:
    """The process continues with its other calls."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=1.0, retries=1)
    hanging, short, *concurrent = [
        pool.submit("awaits", {"seconds": 1000.0}),
        pool.submit("awaits", {"seconds": 1000.0}, 0.2),
        *(pool.submit("awaits", {"seconds": 0.8}) for _ in range(6)),
    ]
    values = [outcome.value for other in concurrent if isinstance(outcome := other.result(10), Answered)]
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


@pytest.mark.parametrize("action", ["block", "compute", "child blocks"])
def test_only_the_blocking_async_call_fails(make: Callable[..., ProcessPool], action: str) -> None:
    """The blocked process is killed. Concurrent calls in it, also past their limit, run again without counting a retry."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=1.0)
    concurrent = [pool.submit("awaits", {"seconds": 0.9}) for _ in range(3)]
    blocks = pool.submit("awaits", {"seconds": 0.1, "what": action})
    behind = [pool.submit("awaits", {"seconds": 0.1}) for _ in range(20)]
    outcome = blocks.result(20)
    assert isinstance(outcome, Failed) and outcome.kind == "timeout" and outcome.seconds >= 1
    assert outcome.cause == "it ran for longer than 1 s (agent.tool_timeout)"
    for other in (*concurrent, *behind):
        answer = other.result(20)
        assert isinstance(answer, Answered) and answer.retries == 0, answer


def test_a_blocking_call_within_its_limit_fails_with_the_blocked_time(make: Callable[..., ProcessPool]) -> None:
    """The concurrent call began earlier and reaches its limit first, but did not block the process."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=4.0)
    concurrent = pool.submit("awaits", {"seconds": 0.4}, 0.5)
    blocks = pool.submit("awaits", {"seconds": 0.1, "what": "block"})
    outcome, other = blocks.result(20), concurrent.result(20)
    assert isinstance(other, Answered) and other.retries == 0
    assert isinstance(outcome, Failed) and outcome.kind == "timeout" and 1.5 <= outcome.seconds < 4
    assert outcome.cause.startswith("it blocked its process for 1.")


@pytest.mark.parametrize(
    ("action", "kind", "cause"),
    [
        ("cancelled", "error", "it raised CancelledError: "),
        ("leave", "error", "it raised SystemExit: 4"),
        ("child leaves", "error", "it raised SystemExit: 4"),
        ("exit", "crash", "its process ended with exit status 3"),
        ("stubborn", "timeout", "it ran for longer than 1 s (agent.tool_timeout)"),
    ],
)
def test_how_an_async_call_fails(make: Callable[..., ProcessPool], action: str, kind: str, cause: str) -> None:
    """Concurrent calls in the same process succeed."""
    pool = make(["awaits"], processes=1, concurrent=8, timeout=1.0)
    concurrent = [pool.submit("awaits", {"seconds": 0.3}) for _ in range(3)]
    outcome = pool.submit("awaits", {"seconds": 0.1, "what": action}).result(20)
    assert isinstance(outcome, Failed) and (outcome.kind, outcome.cause) == (kind, cause)
    for other in concurrent:
        answer = other.result(20)
        assert isinstance(answer, Answered) and answer.retries == 0


def test_a_seats_calls_share_a_process_until_the_last_one(make: Callable[..., ProcessPool]) -> None:
    """Calls of a seat neither take a worker from other calls, nor reach one of their processes."""
    pool = make(processes=1)
    seat, other = Seat(), Seat()
    first, second, third = (
        pool.submit("told", 0, seat=place).result(10).value["own"]  # type: ignore[union-attr]
        for place in (seat, other, seat)
    )
    worker = pool.submit("told", 0).result(10).value["own"]  # type: ignore[union-attr]
    assert first == third and len({first, second, worker}) == 3
    blocked = pool.submit("sleeps", 3.0, seat=other)
    assert isinstance(pool.submit("told", 0, seat=seat, last=True).result(2), Answered)
    late = pool.submit("told", 0, seat=seat).result(10)
    assert isinstance(late, Failed) and (late.kind, late.cause) == ("crash", SEAT_ENDED)
    assert isinstance(pool.submit("told", 0).result(2), Answered) and not blocked.done()


def test_a_seat_ends_with_a_call_that_hangs(make: Callable[..., ProcessPool]) -> None:
    """Calls behind it would run without their state, so they fail, and nothing is repeated."""
    pool = make(processes=1, retries=3)
    seat = Seat()
    hung, behind = pool.submit("sleeps", 60.0, 0.3, seat=seat), pool.submit("told", 0, seat=seat)
    outcome = hung.result(10)
    assert isinstance(outcome, Failed) and (outcome.kind, outcome.attempts) == ("timeout", 1)
    for waiting in (behind, pool.submit("told", 0, seat=seat)):
        outcome = waiting.result(10)
        assert isinstance(outcome, Failed) and (outcome.kind, outcome.cause) == ("crash", SEAT_ENDED)


def test_calls_of_seats_fail_with_the_pool(make: Callable[..., ProcessPool]) -> None:
    pool = make(processes=1)
    seat = Seat()
    calls = [pool.submit("sleeps", 60.0, seat=seat), pool.submit("told", 0, seat=seat)]
    pool.submit("told", 0).result(10)
    pool.close()
    for call in calls:
        with pytest.raises(RuntimeError, match="shut down"):
            call.result(1)


def test_many_processes_that_end_together_do_not_block_the_pool(
    make: Callable[..., ProcessPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands to kill them and the fork server's messages about them fill both directions of the connection."""
    pair, assign = socket.socketpair, ProcessPool._assign

    def with_small_buffers(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        ends = pair(*arguments)
        if arguments:  # the connection to the fork server
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ends

    def slow(pool: ProcessPool) -> None:
        assign(pool)
        time.sleep(0.3)  # the answers of many processes are there when it looks

    monkeypatch.setattr(socket, "socketpair", with_small_buffers)
    pool = make(["told"], processes=0, timeout=60.0)
    seats = [Seat() for _ in range(40)]
    for future in [pool.submit("told", {}, seat=seat) for seat in seats]:
        future.result(60)
    monkeypatch.setattr(ProcessPool, "_assign", slow)
    for future in [pool.submit("told", {}, seat=seat, last=True) for seat in seats]:
        assert isinstance(future.result(30), Answered)


def _no_more_files(*_: Any) -> Any:
    raise OSError(24, "Too many open files")


def test_no_call_is_lost_when_a_process_cannot_be_started(
    make: Callable[..., ProcessPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(["told"], processes=0)
    monkeypatch.setattr(socket, "socketpair", _no_more_files)
    for future in [pool.submit("told", {}, seat=Seat()) for _ in range(3)]:
        with pytest.raises(RuntimeError, match="Too many open files"):
            future.result(20)


def test_a_call_at_its_limit_is_not_lost_when_its_process_cannot_be_replaced(
    make: Callable[..., ProcessPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(["sleeps"], timeout=0.5)
    pool.submit("sleeps", 0).result(20)
    monkeypatch.setattr(socket, "socketpair", _no_more_files)
    outcome = pool.submit("sleeps", 60).result(20)
    assert isinstance(outcome, Failed) and outcome.kind == "timeout"


def test_the_limit_on_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 20) if hard >= 0 else 1 << 20, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
