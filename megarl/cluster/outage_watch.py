"""Outages of services outside the run, in the controller: notices, metrics, and the end of the run after a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from megarl.cluster.base import Service
from megarl.cluster.outages import Outage
from megarl.types import Metrics


class ServiceOutage(RuntimeError):
    """A service outside the run has been down for longer than `rollout.outage_timeout`. A restart of the run cannot help."""


class ReportingEngine(Protocol):
    """An engine of the policy. Its process calls services."""

    service: Service

    def outages(self, seen: int) -> Future[tuple[int, list[Outage]]]: ...


class OutageWatch:
    """The outages that a run's engines report. Call its methods from the controller's thread.

    Several engines may report the same service: it is back when none reports it any more.
    """

    def __init__(
        self,
        engines: Sequence[ReportingEngine],
        limit: float,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit: `rollout.outage_timeout`. notice: receives messages for the user. clock: seconds."""
        self._engines, self._limit, self._notice, self._clock = list(engines), limit, notice, clock
        self._processes: list[Service] = []  # of the engines
        self._calls: list[Future[tuple[int, list[Outage]]]] = []  # of the engines, from the first poll on
        self._reports: list[dict[str, tuple[float, str]]] = [{} for _ in self._engines]  # service -> since, cause
        self._since: dict[str, float] = {}  # of services that are down
        self._polled, self._seconds = clock(), 0.0

    def add(self, engine: ReportingEngine) -> None:
        """Read the reports of a further engine, too."""
        self._engines.append(engine)
        self._reports.append({})

    @property
    def is_down(self) -> bool:
        """True while a service is down."""
        return bool(self._since)

    def poll(self) -> None:
        """Read the engines' reports and print notices."""
        now = self._clock()
        self._seconds += now - self._polled if self._since else 0.0
        self._polled = now
        for engine in self._engines[len(self._calls) :]:
            self._processes.append(engine.service)
            self._calls.append(engine.outages(0))
        for index, call in enumerate(self._calls):
            if call.done():
                self._read(index, call, now)
        down: dict[str, tuple[float, str]] = {}
        for report in self._reports:
            for service, (since, cause) in report.items():
                down[service] = min(down.get(service, (since, cause)), (since, cause))
        for service in [service for service in self._since if service not in down]:
            self._notice(f"{service} is back after {now - self._since.pop(service):.0f} s")
        for service, (since, cause) in down.items():
            if service not in self._since:
                self._since[service] = since
                limit = f"for at most {self._limit:g} s (rollout.outage_timeout)"
                self._notice(f"{service} is down: {cause}. Samples that need it wait, {limit}")

    def check(self) -> None:
        """Call `poll`, and raise ServiceOutage if a service has been down for longer than the limit."""
        self.poll()
        for service, since in self._since.items():
            seconds = self._clock() - since
            if seconds > self._limit:
                cause = next(report[service][1] for report in self._reports if service in report)
                raise ServiceOutage(
                    f"{service} has been down for {seconds:.0f} s (rollout.outage_timeout = {self._limit:g}): {cause}. When it is "
                    "back, continue the run with train.resume=auto"
                )

    def take_metrics(self) -> Metrics:
        """Return the seconds in which a service was down since the last call, if any."""
        self.poll()
        seconds, self._seconds = self._seconds, 0.0
        return {"rollout/outage_seconds": seconds} if seconds else {}

    def _read(self, index: int, call: Future[tuple[int, list[Outage]]], now: float) -> None:
        engine = self._engines[index]
        if call.exception() is None:
            seen, outages = call.result()
        elif engine.service is not self._processes[index]:  # the engine died, and has a new process
            seen, outages = 0, []
        else:
            lost, self._reports[index] = self._reports[index], {}
            for service in lost:
                if not any(service in report for report in self._reports):
                    self._since.pop(service, None)  # it may still be down: no notice that it is back
            return
        self._reports[index] = {outage.service: (now - outage.seconds, outage.cause) for outage in outages}
        self._processes[index] = engine.service
        self._calls[index] = engine.outages(seen)
