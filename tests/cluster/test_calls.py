"""Waits for calls to services."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import calls
from megarl.cluster.calls import StallTimer, wait_for_all


def test_processes_are_checked_while_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped engine answers no call: only the check finds it, and kills it."""
    monkeypatch.setattr(calls, "_POLL_SECONDS", 0.01)
    answered: Future[str] = Future()
    answered.set_result("joined")
    stopped: Future[str] = Future()
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            stopped.set_exception(ChildProcessError("engine1 was stopped"))

    services: Any = [SimpleNamespace(name=f"engine{number}") for number in range(2)]
    with pytest.raises(ChildProcessError, match="engine1"):
        wait_for_all(services, [answered, stopped], doing="connect", key="weight_sync.timeout", limit=30.0, check=check)
    assert len(checks) == 3


def test_results_keep_the_order_of_the_services() -> None:
    results: list[Future[int]] = [Future() for _ in range(3)]
    for number in (2, 0, 1):
        results[number].set_result(number)
    services: Any = [SimpleNamespace(name=f"engine{number}") for number in range(3)]
    assert wait_for_all(services, results, doing="load", key="rollout.start_timeout", limit=1.0) == [0, 1, 2]


def test_a_stall_timer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage does not count, and the time before it is forgotten."""
    now, paused = [0.0], [False]
    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])
    timer = StallTimer(10.0, pauses=lambda: paused[0])
    now[0], paused[0] = 9.0, True
    timer.check(1, "number 0")
    now[0] = 500.0
    timer.check(1, "number 0")
    paused[0] = False
    now[0] = 510.0
    timer.check(1, "number 0")
    now[0] = 510.5
    with pytest.raises(RuntimeError, match="no group has finished for 10 s"):
        timer.check(1, "number 0")


def test_a_long_wait_is_reported_every_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading a large model takes minutes; so does an engine that waits for a lock."""
    now, results = [0.0], [Future[int]() for _ in range(3)]
    results[1].set_result(1)
    services: Any = [SimpleNamespace(name=f"engine{number}") for number in range(3)]

    def wait(left: set[Future[int]], **_: Any) -> Any:
        now[0] += 25.0
        return {call for call in left if call.done()}, {call for call in left if not call.done()}

    def check() -> None:
        if now[0] >= 150:
            for call in (results[0], results[2]):
                call.set_result(2)

    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(calls, "wait_for_futures", wait)
    with caplog.at_level(logging.WARNING):
        wait_for_all(services, results, doing="load", key="rollout.start_timeout", limit=1800.0, check=check)
    first, second = caplog.messages
    assert first.startswith(
        "megarl has waited 75 s for engine0 and 1 other to load (rollout.start_timeout = 1800 s). See logs/engine0"
    )
    assert second.startswith("megarl has waited 150 s")
