"""The controller's watch over services: notices, seconds, the limit, and engines that die."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from megarl.cluster.outage_watch import OutageWatch, ServiceOutage
from megarl.cluster.outages import Outage
from megarl.errors import ProcessFailure


class Engine:
    """Reports outages when the test says so."""

    def __init__(self) -> None:
        self.service: Any = object()
        self.seen: list[int] = []
        self.call: Future[tuple[int, list[Outage]]] = Future()

    def outages(self, seen: int) -> Future[tuple[int, list[Outage]]]:
        self.seen.append(seen)
        self.call = Future()
        return self.call

    def report(self, *outages: Outage) -> None:
        self.call.set_result((self.seen[-1] + 1, list(outages)))


class Watched:
    """A watch over two engines, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now, self.notices = 0.0, list[str]()
        self.engines = [Engine(), Engine()]
        self.watch = OutageWatch(self.engines, 60.0, self.notices.append, lambda: self.now)
        self.watch.poll()

    def poll(self, now: float) -> None:
        self.now = now
        self.watch.poll()


def test_a_service_is_reported_once_for_all_engines_and_when_it_is_back() -> None:
    watched = Watched()
    first, second = watched.engines
    watched.poll(99.0)
    assert not watched.notices and not watched.watch.is_down and watched.watch.take_metrics() == {}
    first.report(Outage("http://judge/score", 3.0, "no connection"))
    watched.poll(100.0)
    second.report(Outage("http://judge/score", 1.0, "no connection"))
    watched.poll(101.0)
    assert watched.watch.is_down and watched.notices == [
        "http://judge/score is down: no connection. Samples that need it wait, for at most 60 s (rollout.outage_timeout)"
    ]
    first.report()
    watched.poll(110.0)
    assert watched.watch.is_down, "the second engine does not reach it"
    second.report()
    watched.poll(112.0)
    assert not watched.watch.is_down and watched.notices[1:] == ["http://judge/score is back after 15 s"]
    assert watched.watch.take_metrics() == {"rollout/outage_seconds": 12.0} and watched.watch.take_metrics() == {}
    assert first.seen == second.seen == [0, 1, 2]


def test_a_change_between_two_polls_is_one_report_and_services_are_apart() -> None:
    watched = Watched()
    watched.engines[0].report(Outage("tool 'look'", 0.0, "x"), Outage("MCP server 'a'", 0.0, "y"))
    watched.poll(1.0)
    watched.engines[0].report(Outage("MCP server 'a'", 9.0, "z"))
    watched.poll(10.0)
    assert [notice.partition(":")[0] for notice in watched.notices] == [
        "tool 'look' is down",
        "MCP server 'a' is down",
        "tool 'look' is back after 9 s",
    ]


def test_the_limit_ends_the_run_and_is_no_failure_of_a_process() -> None:
    """`train.restarts` starts a run again after a ProcessFailure, which would not help here."""
    watched = Watched()
    watched.engines[1].report(Outage("http://judge/score", 2.0, "it answered 503"))
    watched.poll(10.0)
    watched.now = 68.0
    watched.watch.check()
    watched.now = 68.5
    with pytest.raises(ServiceOutage) as raised:
        watched.watch.check()
    assert not isinstance(raised.value, ProcessFailure)
    text = "http://judge/score has been down for 60 s (rollout.outage_timeout = 60): it answered 503. When it is back, continue"
    assert str(raised.value).startswith(text)


def test_the_report_of_a_dead_engine_ends_with_it_and_its_new_process_is_called() -> None:
    watched = Watched()
    first, second = watched.engines
    first.report(Outage("http://judge/score", 0.0, "no connection"))
    watched.poll(1.0)
    first.call.set_exception(ProcessFailure("engine0 died"))
    watched.poll(2.0)
    assert not watched.watch.is_down and len(watched.notices) == 1, "it may still be down"
    calls = len(first.seen)
    watched.poll(3.0)
    assert len(first.seen) == calls, "the process is dead"
    first.service = object()
    watched.poll(4.0)
    assert first.seen[-1] == 0 and len(first.seen) == calls + 1
    first.report(Outage("http://judge/score", 1.0, "no connection"))
    watched.poll(5.0)
    assert watched.watch.is_down and second.seen == [0]
