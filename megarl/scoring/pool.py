"""Processes that score: one sample at a time each, ended at the time limit, replaced when they end.

One thread owns everything here. A process is given a few samples at a time and answers each as it is done, so a
sample's time begins when its process has answered the one before it (or was given it while idle): waiting in a queue
never counts. What waited behind a sample that hangs or crashes is given to another process, without blame.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster.process import without_torchrun
from megarl.cluster.wire import Wire
from megarl.rewards import Score, ScoreRequest
from megarl.scoring.nursery import PACKET
from megarl.types import ScoringFailure

NURSERY = "megarl.scoring.nursery"
MOST_AT_ONCE = 16  # samples given to a process at once
STILLBORN = 5  # processes in a row that end before they can score anything
STOP_SECONDS = 5.0  # left to the nursery to end everything before it is killed
NURSERY_STOPPED = "the process that scoring processes are forked from has ended; see the engine's log"

Outcome = tuple["Score | ScoringFailure", int]
"""What became of a sample, and how many attempts failed and were made again."""


@dataclass
class _Job:
    scorer: str
    request: ScoreRequest
    future: Future[Outcome] = field(default_factory=Future)
    attempts: int = 0


@dataclass
class _Worker:
    number: int
    connection: socket.socket
    wire: Wire
    ready: bool = False
    jobs: deque[_Job] = field(default_factory=deque)  # the first one runs
    since: float = 0.0  # when it began, by time.monotonic


class ProcessPool:
    """Scores with `scorers` (registered names, or module:function) in `processes` processes.

    timeout: seconds that one call of a scorer may take. retries: attempts after the first one that fails.
    """

    def __init__(self, scorers: Sequence[str], processes: int, timeout: float, retries: int) -> None:
        self.processes, self.timeout, self.retries = processes, timeout, retries
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = without_torchrun(dict(os.environ))
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", NURSERY, str(theirs.fileno()), json.dumps(sorted(set(scorers)))],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        theirs.close()
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._lock = threading.Lock()  # over the three below
        self._submitted: deque[_Job] = deque()
        self._closed = False
        self._broken: str | None = None
        self._queue: deque[_Job] = deque()
        self._workers: dict[int, _Worker] = {}
        self._dying: dict[int, _Job | None] = {}  # processes that ended by themselves, and what they were at
        self._stillborn = 0
        self._thread = threading.Thread(target=self._run, name="scoring-pool", daemon=True)

    def start(self) -> None:
        """Wait until scorers are imported, and begin. Raises RuntimeError where one cannot be."""
        answer = self._packet()
        if answer != b'["ready"]':
            cause = json.loads(answer)[1] if answer else NURSERY_STOPPED
            self.close()
            raise RuntimeError(f"scorers could not be imported in a process of their own: {cause}")
        self._thread.start()

    def submit(self, scorer: str, request: ScoreRequest) -> Future[Outcome]:
        """Score one sample. The future has an exception only where the pool itself is at its end."""
        job = _Job(scorer, request)
        job.future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._lock:
            if self._broken is not None or self._closed:
                job.future.set_exception(RuntimeError(self._broken or "scoring has been shut down"))
                return job.future
            self._submitted.append(job)
            first = len(self._submitted) == 1
        if first:
            with contextlib.suppress(OSError):  # closed meanwhile, and the job has failed with the others
                self._wake.send(b"!")
        return job.future

    def close(self) -> None:
        """End every process. What is still to be scored fails."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        if self._thread.is_alive():
            self._wake.send(b"!")
            self._thread.join()
        self._control.close()  # the nursery ends its children, and itself
        try:
            self._nursery.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        for connection in (self._wake, self._wakeup):
            connection.close()

    def _run(self) -> None:
        cause = "scoring has been shut down"
        try:
            self._selector.register(self._control, selectors.EVENT_READ, self._hear)
            self._selector.register(self._wakeup, selectors.EVENT_READ, self._accept)
            for _ in range(self.processes):
                self._fork()
            while not self._closed:
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._end_the_overdue()
                self._assign()
        except BaseException as error:  # noqa: BLE001 -- everyone who waits is told
            cause = str(error) if isinstance(error, _PoolError) else f"the scoring pool failed: {error!r}"
        with self._lock:
            self._broken = cause
            left = [*self._submitted, *self._queue, *(job for job in self._dying.values() if job is not None)]
        for worker in self._workers.values():
            left += worker.jobs
            worker.connection.close()
        self._selector.close()
        for job in left:
            job.future.set_exception(RuntimeError(cause))

    def _accept(self) -> None:
        self._wakeup.recv(PACKET)
        with self._lock:
            self._queue.extend(self._submitted)
            self._submitted.clear()

    def _hear(self) -> None:
        """The nursery says that a process has ended, and how."""
        message = self._packet()
        if not message:
            raise _PoolError(NURSERY_STOPPED)
        _, number, status = json.loads(message)
        while number in self._workers and _readable(self._workers[number].connection):
            self._read(self._workers[number])  # what it answered before its end, and the end
        if number in self._workers:
            self._drop(self._workers[number])
        job = self._dying.pop(number, None)
        if job is not None:
            self._failed(job, "crash", f"its process {_how_it_ended(status)}")

    def _packet(self) -> bytes:
        """The nursery's next message; empty: it has ended."""
        try:
            return self._control.recv(PACKET)
        except ConnectionResetError:
            return b""

    def _read(self, worker: _Worker) -> None:
        if worker.number not in self._workers:  # dropped since the selector saw it
            return
        try:
            answer = worker.wire.receive()
        except Exception:  # noqa: BLE001 -- the end of the connection, or a message that nobody understands
            self._tell("kill", worker.number)  # what has not ended by itself yet
            self._drop(worker)
            return
        if not worker.ready:
            worker.ready, self._stillborn = True, 0
            return
        job, worker.since = worker.jobs.popleft(), time.monotonic()
        if isinstance(answer, Score):
            job.future.set_result((answer, job.attempts))
        else:
            self._failed(job, "error", answer)

    def _drop(self, worker: _Worker) -> None:
        """A process has ended by itself: the nursery will say how."""
        self._dying[worker.number] = worker.jobs.popleft() if worker.jobs else None
        if not worker.ready:
            self._stillborn += 1
            if self._stillborn >= STILLBORN:
                raise _PoolError(f"{STILLBORN} scoring processes in a row ended before they could score anything")
        self._replace(worker)

    def _end_the_overdue(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            # An answer that is there, and that this thread was too late to read, is in time.
            if worker.jobs and now - worker.since > self.timeout and not _readable(worker.connection):
                self._tell("kill", worker.number)
                job = worker.jobs.popleft()
                self._replace(worker)
                self._failed(job, "timeout", f"it ran for longer than {self.timeout:g} s (reward.timeout)")

    def _replace(self, worker: _Worker) -> None:
        self._queue.extendleft(reversed(worker.jobs))
        worker.jobs.clear()
        del self._workers[worker.number]
        self._selector.unregister(worker.connection)
        worker.connection.close()
        self._fork()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        worker = _Worker(next(self._numbers), ours, Wire(ours))
        self._tell("fork", worker.number, theirs.fileno())
        theirs.close()
        self._workers[worker.number] = worker
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read(worker))

    def _tell(self, word: str, number: int, *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps([word, number]).encode()], list(descriptors))
        except OSError as error:
            raise _PoolError(NURSERY_STOPPED) from error

    def _assign(self) -> None:
        """Few samples at a time where few are left, so that all processes end together."""
        for worker in list(self._workers.values()):
            if not self._queue:
                return
            if worker.ready and not worker.jobs:
                count = min(MOST_AT_ONCE, max(1, len(self._queue) // (4 * self.processes)))
                worker.jobs.extend(self._queue.popleft() for _ in range(count))
                worker.since = time.monotonic()
                # A process that has ended meanwhile is heard of.
                with contextlib.suppress(OSError):
                    worker.wire.send([(job.scorer, job.request) for job in worker.jobs])

    def _patience(self) -> float | None:
        """Seconds until the next sample is overdue."""
        began = [worker.since for worker in self._workers.values() if worker.jobs]
        return max(0.0, min(began) + self.timeout - time.monotonic()) + 0.001 if began else None

    def _failed(self, job: _Job, kind: Any, cause: str) -> None:
        job.attempts += 1
        if job.attempts <= self.retries:
            self._queue.append(job)
        else:
            failure = ScoringFailure(job.scorer, job.request.uid, kind, cause, job.attempts)
            job.future.set_result((failure, job.attempts - 1))


class _PoolError(RuntimeError):
    """What ends the pool, in words for people."""


def _readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
