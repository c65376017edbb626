"""The pool's view of one worker process: its pending calls, their deadlines, and which call is to blame for a failure."""

from __future__ import annotations

import selectors
import signal
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.job import Failed, Outcome
from megarl.subprocess_pool.progress_mark import IDLE, ProgressMark

GRACE = 1.0  # seconds after its time limit in which a concurrent call must be cancelled by its process
SEAT_ENDED = "the process with its state has ended"


@dataclass
class PendingCall:
    """A call without an outcome yet. Times come from time.monotonic; `limit` is in seconds.

    repeats_timeouts: further attempts follow after a time-out, too.
    seat: the process that must run it; None: any worker. `last`: that process ends after the call.
    """

    number: int
    name: str
    request: bytes
    limit: float
    future: Future[Outcome] = field(default_factory=Future)
    attempts: int = 0
    started: float | None = None  # None: waiting
    repeats_timeouts: bool = True
    seat: Seat | None = None
    last: bool = False


@dataclass(eq=False)
class Seat:
    """A process for calls that share state, one after the other. It starts with the first call, and ends after a call marked
    `last`, after a crash, or when a call reaches its time limit. Later calls then fail with the cause `SEAT_ENDED`."""

    waiting: deque[PendingCall] = field(default_factory=deque)
    started: bool = False
    ended: bool = False

    def end(self, unanswered: Sequence[PendingCall] = ()) -> None:
        """Fail `unanswered`, the waiting calls and all later ones. Their state is lost, so they are never repeated."""
        self.ended = True
        for call in (*unanswered, *self.waiting):
            call.future.set_result(Failed("crash", SEAT_ENDED, call.attempts + 1, 0.0))
        self.waiting.clear()


@dataclass
class WorkerProcess:
    """A worker process. With a `mark` its calls run concurrently; without, one after the other. `seat`: it runs only the calls
    of this seat."""

    number: int
    channel: NonblockingChannel
    mark: ProgressMark | None
    ready: bool = False
    calls: dict[int, PendingCall] = field(default_factory=dict)  # by number, in the order they were sent
    last_message: float = 0.0  # time of the last message from it, or of the calls sent to it while it was idle
    events: int = selectors.EVENT_READ
    seat: Seat | None = None

    def send(self, calls: list[PendingCall], now: float) -> None:
        if not self.calls:
            self.last_message = now
        self.calls.update((call.number, call) for call in calls)
        self.channel.send([(call.number, call.name, call.request, call.limit) for call in calls])
        self._start_next(now)

    def finish(self, number: int, now: float) -> PendingCall:
        """Remove and return a call that has an answer."""
        call = self.calls.pop(number)
        call.started = None  # a retry may follow
        self._start_next(now)
        return call

    def withdraw(self) -> list[PendingCall]:
        """Remove and return all unanswered calls."""
        calls = list(self.calls.values())
        self.calls.clear()
        for call in calls:
            call.started = None
        return calls

    def _start_next(self, now: float) -> None:
        """Start the clock of the next sequential call. Concurrent calls report their own start."""
        if self.mark is None and self.calls:
            next(iter(self.calls.values())).started = now

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of its calls; None if it has no calls."""
        return min((self._deadline(call) for call in self._timed_calls()), default=None)

    def overdue(self, now: float) -> list[PendingCall]:
        return [call for call in self._timed_calls() if now > self._deadline(call)]

    def _timed_calls(self) -> list[PendingCall]:
        """The running calls. If none has started, the waiting ones, so that a stuck process still meets a deadline."""
        return [call for call in self.calls.values() if call.started is not None] or list(self.calls.values())

    def _deadline(self, call: PendingCall) -> float:
        started = self.last_message if call.started is None else call.started
        return started + call.limit + (0.0 if self.mark is None else GRACE)

    def blocking(self, now: float) -> tuple[PendingCall, float] | None:
        """Return the concurrent call that blocks the event loop, and for how many seconds; None if no call does."""
        number, since = (IDLE, now) if self.mark is None else self.mark.read()
        return (self.calls[number], now - since) if number in self.calls and now - since > GRACE / 2 else None

    def calls_to_blame(self) -> list[PendingCall]:
        """Return the call that was executing when the process died; all running calls if that is unknown."""
        number = IDLE if self.mark is None else self.mark.read()[0]
        return [self.calls[number]] if number in self.calls else self._timed_calls()

    def close(self) -> None:
        self.channel.connection.close()
        if self.mark is not None:
            self.mark.close()


def exit_text(status: int) -> str:
    """Describe the exit status of a process; negative: the signal that killed it."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
