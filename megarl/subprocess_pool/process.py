"""A process as its pool sees it: what it was given, whose time is up, and who is to blame."""

from __future__ import annotations

import selectors
from concurrent.futures import Future
from dataclasses import dataclass, field

from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.job import Outcome
from megarl.subprocess_pool.progress_mark import ProgressMark

GRACE = 1.0  # seconds in which a process that has many calls under way is to end one whose time is up by itself


@dataclass
class Call:
    """A call to be made. Times are those of time.monotonic; `limit` is in seconds."""

    number: int
    name: str
    request: bytes
    limit: float
    future: Future[Outcome] = field(default_factory=Future)
    attempts: int = 0
    started: float | None = None  # None: it waits


@dataclass
class Worker:
    """A process. With a `mark` it has its calls under way together; without, one after the other."""

    number: int
    channel: NonblockingChannel
    mark: ProgressMark | None
    ready: bool = False
    jobs: dict[int, Call] = field(default_factory=dict)  # by their numbers, in the order in which it was given them
    heard: float = 0.0  # when it last said something, or was given work while it had none
    events: int = selectors.EVENT_READ

    def give(self, jobs: list[Call], now: float) -> None:
        if not self.jobs:
            self.heard = now
        self.jobs.update((job.number, job) for job in jobs)
        self.channel.send([(job.number, job.name, job.request, job.limit) for job in jobs])
        self._begin_next(now)

    def done(self, number: int, now: float) -> Call:
        """A job is answered."""
        job = self.jobs.pop(number)
        job.started = None  # it may have to be made again
        self._begin_next(now)
        return job

    def take(self) -> list[Call]:
        """What it was given and has not answered is somebody else's."""
        jobs = list(self.jobs.values())
        self.jobs.clear()
        for job in jobs:
            job.started = None
        return jobs

    def _begin_next(self, now: float) -> None:
        """One after the other: the first has begun. Together: the process says what has."""
        if self.mark is None and self.jobs:
            next(iter(self.jobs.values())).started = now

    def end(self) -> float | None:
        """When the first of its calls is overdue; None: it has none."""
        return min((self._end(job) for job in self._clocks()), default=None)

    def overdue(self, now: float) -> list[Call]:
        return [job for job in self._clocks() if now > self._end(job)]

    def _clocks(self) -> list[Call]:
        """The calls that run. A process that gets to begin none is held to the time of those that wait."""
        return [job for job in self.jobs.values() if job.started is not None] or list(self.jobs.values())

    def _end(self, job: Call) -> float:
        began = self.heard if job.started is None else job.started
        return began + job.limit + (0.0 if self.mark is None else GRACE)

    def blocking(self, now: float) -> tuple[Call, float] | None:
        """The call of many that keeps the process from all others, and for how many seconds it has."""
        number, since = (-1, now) if self.mark is None else self.mark.read()
        return (self.jobs[number], now - since) if number in self.jobs and now - since > GRACE / 2 else None

    def culprits(self) -> list[Call]:
        """What it was at when it died: all that ran, where nobody knows."""
        number = -1 if self.mark is None else self.mark.read()[0]
        return [self.jobs[number]] if number in self.jobs else self._clocks()

    def close(self) -> None:
        self.channel.connection.close()
        if self.mark is not None:
            self.mark.close()
