"""Waits for calls to services."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import calls
from megarl.cluster.calls import wait_for_all


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
