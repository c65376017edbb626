"""Processes that answer requests: one at a time each, ended at the time limit, replaced when they end.

One thread owns everything here. A process is given a few requests at a time and answers each as it is done, so a call's
time begins when its process has answered the one before it (or was given it while idle): waiting in a queue never
counts. What waited behind a call that hangs or crashes is given to another process, without blame.

With `concurrent`, a process has so many calls of async functions under way at a time, and says when each begins. It
cancels a call at its time's end; a process that does not is killed a moment later. Which call it was at then it has left in
its `ProgressMark`: that one is to blame, and the others are given to another process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pickle
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
from typing import Any, Literal

from megarl.cluster.process import without_torchrun
from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.fork_server import PACKET
from megarl.subprocess_pool.job import Answered, Failed, Outcome
from megarl.subprocess_pool.process import Call, Worker
from megarl.subprocess_pool.progress_mark import new_progress_mark

FORK_SERVER = "megarl.subprocess_pool.fork_server"
MAX_BATCH = 16  # requests given to a process at once
MAX_FAILED_STARTS = 5  # processes in a row that end before they can do anything
START_SECONDS = 600.0  # for what is to be called to be imported and prepared
STOP_SECONDS = 5.0  # left to the nursery to end everything before it is killed
FORK_SERVER_STOPPED = "the process that others are forked from has ended; see the engine's log"
CLOSED = "the pool of processes has been shut down"


class ProcessPool:
    """Answers requests in `processes` processes, which have `concurrent` calls under way at a time (more than one: `names`
    are all of async functions). A process is given up to `at_once` requests, which wait there for each other.

    finder: "module:function" that is called with one of `names` and `settings` (which JSON can hold) and returns its
    `Job`; both are imported where the work is done. timeout: seconds that one call may run; `timeout_key` is the
    recipe's key for it, which people are told. retries: attempts after the first one that fails. memory_mb: MiB that a
    process may have, as `limits.limit_memory` counts them.
    """

    def __init__(
        self,
        finder: str,
        names: Sequence[str],
        settings: dict[str, Any],
        *,
        processes: int,
        timeout: float,
        retries: int,
        timeout_key: str,
        concurrent: int = 1,
        at_once: int = MAX_BATCH,
        memory_mb: int | None = None,
    ) -> None:
        self.names, self.processes, self.retries = sorted(set(names)), processes, retries
        self.concurrent, self.at_once = concurrent, at_once
        self.timeout, self.timeout_key = timeout, timeout_key
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errand = json.dumps([finder, self.names, settings, memory_mb]).encode()
        if len(errand) > PACKET:
            raise ValueError(f"names and settings of {finder} take {len(errand)} bytes: {PACKET} at most")
        self._control.send(errand)
        environment = without_torchrun(dict(os.environ))
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._fork_server = subprocess.Popen(
            [sys.executable, "-m", FORK_SERVER, str(theirs.fileno())],
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
        self._submitted: deque[Call] = deque()
        self._closed = False
        self._broken: str | None = None
        self._queue: deque[Call] = deque()
        self._workers: dict[int, Worker] = {}
        self._dying: dict[int, list[tuple[Call, float]]] = {}  # ended by themselves: what they were at, for how long
        self._failed_starts = 0
        self._thread = threading.Thread(target=self._run, name="process-pool", daemon=True)

    def start(self) -> None:
        """Wait until all that is to be called is imported, and begin. Raises RuntimeError where something cannot be."""
        self._control.settimeout(START_SECONDS)
        try:
            answer = self._packet()
        except TimeoutError:
            self.close()
            raise RuntimeError(
                f"{', '.join(self.names)} took more than {START_SECONDS:g} s to be imported and prepared in a process apart"
            ) from None
        self._control.settimeout(None)
        if answer != b'["ready"]':
            cause = json.loads(answer)[1] if answer else FORK_SERVER_STOPPED
            self.close()
            raise RuntimeError(f"{', '.join(self.names)} could not be imported in a process apart: {cause}")
        self._thread.start()

    def submit(self, name: str, request: Any, timeout: float | None = None) -> Future[Outcome]:
        """Have `name` called with `request`. `timeout`: seconds that this call may run, where fewer than the pool's.

        The future has an exception only where the pool itself is at its end. Raises what pickle raises for a request
        that it cannot take.
        """
        assert name in self.names, f"{name!r} is none of {self.names}"
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        job = Call(next(self._numbers), name, data, self.timeout if timeout is None else min(timeout, self.timeout))
        job.future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._lock:
            if self._broken is not None or self._closed:
                job.future.set_exception(RuntimeError(self._broken or CLOSED))
                return job.future
            self._submitted.append(job)
            first = len(self._submitted) == 1
        if first:
            with contextlib.suppress(OSError):  # closed meanwhile, and the job has failed with the others
                self._wake.send(b"!")
        return job.future

    def close(self) -> None:
        """End every process. What is still to be answered fails."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        if self._thread.is_alive():
            self._wake.send(b"!")
            self._thread.join()
        self._control.close()  # the nursery ends its children, and itself
        try:
            self._fork_server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._fork_server.kill()
            self._fork_server.wait()
        for connection in (self._wake, self._wakeup):
            connection.close()

    def _run(self) -> None:
        cause = CLOSED
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
            cause = str(error) if isinstance(error, _PoolError) else f"the pool of processes failed: {error!r}"
        with self._lock:
            self._broken = cause
            left = [*self._submitted, *self._queue, *(job for jobs in self._dying.values() for job, _ in jobs)]
        for worker in self._workers.values():
            left += worker.jobs.values()
            worker.close()
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
            raise _PoolError(FORK_SERVER_STOPPED)
        _, number, status = json.loads(message)
        if number in self._workers:
            self._attend(self._workers[number])  # what it answered before its end
        if number in self._workers:
            self._drop(self._workers[number])
        for job, seconds in self._dying.pop(number, []):
            self._failed(job, "crash", f"its process {_how_it_ended(status)}", seconds)

    def _packet(self) -> bytes:
        """The nursery's next message; empty: it has ended."""
        try:
            return self._control.recv(PACKET)
        except ConnectionResetError:
            return b""

    def _attend(self, worker: Worker) -> None:
        """Hear what a process has to say, and go on with what it is told."""
        if worker.number not in self._workers:  # dropped since the selector saw it
            return
        for data in worker.channel.receive():
            try:
                message = pickle.loads(data)  # noqa: S301 -- of this user's own process, see Wire
            except Exception:  # noqa: BLE001 -- something else wrote to its connection
                worker.channel.ended = True
                break
            self._note(worker, message)
        if worker.channel.ended:
            self._tell("kill", worker.number)  # where it has not ended by itself yet
            self._drop(worker)
        else:
            worker.channel.flush()
            self._listen(worker)

    def _note(self, worker: Worker, message: Any) -> None:
        if not worker.ready:
            worker.ready, self._failed_starts = True, 0
            return
        number, word, content, seconds = message
        worker.heard = time.monotonic()
        if word == "started":
            worker.jobs[number].started = worker.heard
            return
        job = worker.done(number, worker.heard)
        if word == "answered":
            self._answered(job, content, seconds)
        elif word == "error":
            self._failed(job, "error", content, seconds)
        else:
            self._failed(job, "timeout", self._too_long(job), seconds)

    def _answered(self, job: Call, content: bytes, seconds: float) -> None:
        try:
            value = pickle.loads(content)  # noqa: S301 -- as above
        except Exception as error:  # noqa: BLE001 -- what it needs is not to be had here
            self._failed(job, "error", f"its answer cannot be read: {type(error).__name__}: {error}", seconds)
        else:
            job.future.set_result(Answered(value, job.attempts, seconds))

    def _drop(self, worker: Worker) -> None:
        """A process has ended by itself: the nursery will say how."""
        now, culprits = time.monotonic(), worker.culprits()
        self._dying[worker.number] = [(job, now - (job.started or worker.heard)) for job in culprits]
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise _PoolError(f"{MAX_FAILED_STARTS} processes in a row ended before they could do anything")
        self._replace(worker, culprits)

    def _end_the_overdue(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            late = worker.overdue(now)
            # An answer that is there, and that this thread was too late to read, is in time.
            if not late or _readable(worker.channel.connection):
                continue
            blocking = worker.blocking(now)
            culprits = late if blocking is None else [blocking[0]]
            ran = {job.number: now - (job.started or worker.heard) for job in culprits}
            self._tell("kill", worker.number)
            self._replace(worker, culprits)
            for job in culprits:
                cause = self._too_long(job)
                if blocking is not None and ran[job.number] < job.limit:
                    cause = (
                        f"it kept its process from all other calls for {blocking[1]:.3g} s, until their time was up: an "
                        "async function has to await what takes long"
                    )
                self._failed(job, "timeout", cause, ran[job.number])

    def _too_long(self, job: Call) -> str:
        key = f" ({self.timeout_key})" if job.limit == self.timeout else ""
        return f"it ran for longer than {job.limit:g} s{key}"

    def _replace(self, worker: Worker, culprits: list[Call]) -> None:
        """Another process in its place; what it was given goes to others, but for the culprits."""
        self._queue.extendleft(job for job in reversed(worker.take()) if job not in culprits)
        del self._workers[worker.number]
        self._selector.unregister(worker.channel.connection)
        worker.close()
        self._fork()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            mark, *shared = stack.enter_context(new_progress_mark()) if self.concurrent > 1 else (None,)
            self._tell("fork", number, theirs.fileno(), *shared)
        worker = Worker(number, NonblockingChannel(ours), mark)
        self._workers[number] = worker
        self._selector.register(ours, worker.events, lambda: self._attend(worker))

    def _listen(self, worker: Worker) -> None:
        """Wait for the process's words; and until it takes more of ours, where there are any left."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.waiting else 0)
        if events != worker.events:
            worker.events = events
            self._selector.modify(worker.channel.connection, events, lambda: self._attend(worker))

    def _tell(self, word: str, number: int, *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps([word, number]).encode()], list(descriptors))
        except OSError as error:
            raise _PoolError(FORK_SERVER_STOPPED) from error

    def _assign(self) -> None:
        for worker in sorted(self._workers.values(), key=lambda worker: len(worker.jobs)):
            count = self._share(worker) if worker.ready else 0
            if count:
                worker.give([self._queue.popleft() for _ in range(count)], time.monotonic())
                self._listen(worker)

    def _share(self, worker: Worker) -> int:
        """How many requests a process is given now: few where few are left, so that all processes end together."""
        if self.concurrent > 1:
            return min(self.concurrent - len(worker.jobs), math.ceil(len(self._queue) / self.processes))
        return 0 if worker.jobs else min(self.at_once, math.ceil(len(self._queue) / (4 * self.processes)))

    def _patience(self) -> float | None:
        """Seconds until the next call is overdue."""
        ends = [end for worker in self._workers.values() if (end := worker.end()) is not None]
        return max(0.0, min(ends) - time.monotonic()) + 0.001 if ends else None

    def _failed(self, job: Call, kind: Literal["error", "timeout", "crash"], cause: str, seconds: float) -> None:
        job.attempts += 1
        if job.attempts <= self.retries:
            self._queue.append(job)
        else:
            job.future.set_result(Failed(kind, cause, job.attempts, seconds))


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
