"""A pool of worker processes: one call at a time each, killed at the time limit, replaced when they end.

One thread runs the pool. A worker receives a few calls at a time and answers each as it finishes. A call's clock starts when
its worker has answered the previous call, or on arrival at an idle worker: time in a queue does not count. Calls queued
behind a call that hangs or crashes move to another worker, and the failure does not count as one of their attempts.

With `concurrent` > 1, a worker runs up to `concurrent` calls of async functions at a time and reports the start of each. It
cancels a call at its limit. The pool kills a worker that has not done so after `process.GRACE` seconds; the worker's
`ProgressMark` names the call that blocks it. Only that call has failed: the others move to another worker.

Calls that share state have a `Seat`: a further process that runs only these calls.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

from megarl.cluster.process import child_environment
from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.control import ControlConnection
from megarl.subprocess_pool.fork_server import PACKET
from megarl.subprocess_pool.job import Answered, Failed, Outcome
from megarl.subprocess_pool.limits import raise_open_files
from megarl.subprocess_pool.process import PendingCall, Seat, WorkerProcess, exit_text
from megarl.subprocess_pool.progress_mark import new_progress_mark

FORK_SERVER = "megarl.subprocess_pool.fork_server"
MAX_BATCH = 16  # calls sent to a worker at once
MAX_FAILED_STARTS = 5  # workers in a row that end before they are ready
START_SECONDS = 600.0  # limit for importing and preparing the jobs
STOP_SECONDS = 5.0  # time for the fork server to end all workers before it is killed
FORK_SERVER_STOPPED = "the pool's fork server has ended; see the engine's log"
CLOSED = "the process pool has been shut down"


class ProcessPool:
    """Execute calls in `processes` processes, each with up to `concurrent` calls at a time.

    factory: "module:function", called with one of `names` and `settings` (JSON values), returns that name's `Job`. Only the
        fork server imports it. With `concurrent` > 1 all jobs must be async functions.
    timeout: seconds that one call may run. `timeout_key`: the recipe key of this limit, for messages.
    retries: further attempts after the first failure.
    at_once: calls sent to a worker at once; they queue there.
    memory_mb: MiB that a worker may allocate, see `limits.limit_memory`.
    """

    def __init__(
        self,
        factory: str,
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
        raise_open_files()  # each process has a connection
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ControlConnection(ours)
        setup = json.dumps([factory, self.names, settings, memory_mb]).encode()
        if len(setup) > PACKET:
            raise ValueError(f"names and settings of {factory} take {len(setup)} bytes: at most {PACKET}")
        ours.send(setup)
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._fork_server = subprocess.Popen(
            # -u: workers end by SIGKILL or os._exit, which would drop buffered output of a job.
            [sys.executable, "-u", "-m", FORK_SERVER, str(theirs.fileno())],
            env=child_environment(one_thread),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # keeps Ctrl-C away from it
        )
        theirs.close()
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._lock = threading.Lock()  # guards the next three
        self._submitted: deque[PendingCall] = deque()
        self._closed = False
        self._broken: str | None = None
        self._queue: deque[PendingCall] = deque()
        self._workers: dict[int, WorkerProcess] = {}
        self._crashed: dict[int, list[tuple[PendingCall, float]]] = {}  # calls to blame and their seconds, by worker
        self._failed_starts = 0
        self._thread = threading.Thread(target=self._run, name="process-pool", daemon=True)

    def start(self) -> None:
        """Wait until the fork server has prepared all jobs, then start workers. Raises RuntimeError if a job fails to import."""
        self._control.connection.settimeout(START_SECONDS)
        try:
            answer = self._control.receive()
        except TimeoutError:
            self.close()
            raise RuntimeError(
                f"{', '.join(self.names)} took more than {START_SECONDS:g} s to import and prepare in a separate process"
            ) from None
        self._control.connection.settimeout(None)
        if answer != b'["ready"]':
            cause = json.loads(answer)[1] if answer else FORK_SERVER_STOPPED
            self.close()
            raise RuntimeError(f"{', '.join(self.names)} could not be imported in a separate process: {cause}")
        self._thread.start()

    def submit(
        self,
        name: str,
        request: Any,
        timeout: float | None = None,
        *,
        repeats_timeouts: bool = True,
        seat: Seat | None = None,
        last: bool = False,
    ) -> Future[Outcome]:
        """Call job `name` with `request`. `timeout`: seconds for this call, at most the pool's.

        repeats_timeouts: the pool's `retries` apply to time-outs, too.
        seat: run the call in this seat's process, without further attempts. `last`: end the process after the call.
        The future raises only if the pool itself has failed or closed. Raises pickle's error if the request cannot be
        pickled.
        """
        assert name in self.names, f"{name!r} is not one of {self.names}"
        assert seat is None or self.concurrent == 1, "a seat's calls run one after the other"
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        limit = self.timeout if timeout is None else min(timeout, self.timeout)
        call = PendingCall(
            next(self._numbers), name, data, limit, repeats_timeouts=repeats_timeouts, seat=seat, last=last
        )
        call.future.set_running_or_notify_cancel()  # rules out cancellation
        with self._lock:
            if self._broken is not None or self._closed:
                call.future.set_exception(RuntimeError(self._broken or CLOSED))
                return call.future
            self._submitted.append(call)
            first = len(self._submitted) == 1
        if first:
            with contextlib.suppress(OSError):  # closed in between: this call has failed like the others
                self._wake.send(b"!")
        return call.future

    def close(self) -> None:
        """End every process. Unanswered calls fail."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        if self._thread.is_alive():
            self._wake.send(b"!")
            self._thread.join()
        self._control.connection.close()  # the fork server kills its children and exits
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
            self._selector.register(self._control.connection, selectors.EVENT_READ, self._on_worker_end)
            self._selector.register(self._wakeup, selectors.EVENT_READ, self._accept)
            for _ in range(self.processes):
                self._fork()
            while not self._closed:
                for key, _ in self._selector.select(self._seconds_to_deadline()):
                    key.data()
                while self._control.read_ahead:
                    self._on_worker_end()
                self._kill_overdue()
                self._assign()
        except BaseException as error:  # noqa: BLE001 -- fails every pending call with the cause
            cause = str(error) if isinstance(error, _PoolError) else f"the process pool failed: {error!r}"
        with self._lock:
            self._broken = cause
            pending = [*self._submitted, *self._queue, *(call for calls in self._crashed.values() for call, _ in calls)]
        for worker in self._workers.values():
            pending += [*worker.calls.values(), *(worker.seat.waiting if worker.seat is not None else ())]
            worker.close()
        self._selector.close()
        for call in pending:
            call.future.set_exception(RuntimeError(cause))

    def _accept(self) -> None:
        self._wakeup.recv(PACKET)
        with self._lock:
            submitted = deque(self._submitted)
            self._submitted.clear()
        try:
            for call in tuple(submitted):
                if call.seat is None:
                    self._queue.append(call)
                else:
                    self._add_to_seat(call.seat, call)
                submitted.popleft()
        finally:  # without a new process for a seat, `_run` fails its call and the rest
            self._queue += submitted

    def _add_to_seat(self, seat: Seat, call: PendingCall) -> None:
        seat.waiting.append(call)
        if seat.ended:
            seat.end()
        elif not seat.started:
            seat.started = True
            self._fork(seat)

    def _on_worker_end(self) -> None:
        """Handle the fork server's message that a worker has ended, with its exit status."""
        message = self._control.receive()
        if not message:
            raise _PoolError(FORK_SERVER_STOPPED)
        _, number, status = json.loads(message)
        if number in self._workers:
            self._on_worker_message(self._workers[number])  # read the last answers first
        if number in self._workers:
            self._drop(self._workers[number])
        for call, seconds in self._crashed.pop(number, []):
            self._fail(call, "crash", f"its process {exit_text(status)}", seconds)

    def _on_worker_message(self, worker: WorkerProcess) -> None:
        """Process a worker's messages; drop it if its connection has ended."""
        if worker.number not in self._workers:  # dropped after the selector returned
            return
        for data in worker.channel.receive():
            try:
                message = pickle.loads(data)  # noqa: S301 -- sent by this user's process, see Wire
            except Exception:  # noqa: BLE001 -- foreign bytes on the connection
                worker.channel.ended = True
                break
            self._process(worker, message)
            if worker.number not in self._workers:  # it has answered its seat's last call
                return
        if worker.channel.ended:
            self._command("kill", worker.number)  # if it still runs
            self._drop(worker)
        else:
            worker.channel.flush()
            self._listen(worker)

    def _process(self, worker: WorkerProcess, message: Any) -> None:
        if not worker.ready:
            worker.ready, self._failed_starts = True, 0
            return
        number, kind, content, seconds = message
        worker.last_message = time.monotonic()
        if kind == "started":
            worker.calls[number].started = worker.last_message
            return
        call = worker.finish(number, worker.last_message)
        if kind == "answered":
            self._answer(call, content, seconds)
        elif kind == "error":
            self._fail(call, "error", content, seconds)
        else:
            self._fail(call, "timeout", self._timeout_cause(call), seconds)
        if call.last:
            self._command("kill", worker.number)
            self._replace(worker, [])

    def _answer(self, call: PendingCall, content: bytes, seconds: float) -> None:
        try:
            value = pickle.loads(content)  # noqa: S301 -- as above
        except Exception as error:  # noqa: BLE001 -- the value needs something that this process lacks
            self._fail(call, "error", f"its answer cannot be read: {type(error).__name__}: {error}", seconds)
        else:
            call.future.set_result(Answered(value, call.attempts, seconds))

    def _drop(self, worker: WorkerProcess) -> None:
        """Replace a worker that has ended. The fork server will report its exit status."""
        now, blamed = time.monotonic(), worker.calls_to_blame()
        self._crashed[worker.number] = [(call, now - (call.started or worker.last_message)) for call in blamed]
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise _PoolError(f"{MAX_FAILED_STARTS} worker processes in a row ended before they were ready")
        self._replace(worker, blamed)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            late = worker.overdue(now)
            # An answer in the socket arrived in time: this thread was late to read it.
            if not late or _readable(worker.channel.connection):
                continue
            blocking = worker.blocking(now)
            blamed = late if blocking is None else [blocking[0]]
            seconds = {call.number: now - (call.started or worker.last_message) for call in blamed}
            self._command("kill", worker.number)
            for call in blamed:
                cause = self._timeout_cause(call)
                if blocking is not None and seconds[call.number] < call.limit:
                    cause = (
                        f"it blocked its process for {blocking[1]:.3g} s, until other calls there reached their time limit: "
                        "an async function must await slow work"
                    )
                self._fail(call, "timeout", cause, seconds[call.number])
            self._replace(worker, blamed)

    def _timeout_cause(self, call: PendingCall) -> str:
        key = f" ({self.timeout_key})" if call.limit == self.timeout else ""
        return f"it ran for longer than {call.limit:g} s{key}"

    def _replace(self, worker: WorkerProcess, blamed: list[PendingCall]) -> None:
        """Start a new worker in place of this one and requeue its calls, except the blamed ones. A seat ends instead."""
        unanswered = [call for call in worker.withdraw() if call not in blamed]
        del self._workers[worker.number]
        self._selector.unregister(worker.channel.connection)
        worker.close()
        if worker.seat is not None:
            worker.seat.end(unanswered)
            return
        self._queue.extendleft(reversed(unanswered))
        self._fork()

    def _fork(self, seat: Seat | None = None) -> None:
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            mark, *shared = stack.enter_context(new_progress_mark()) if self.concurrent > 1 else (None,)
            self._command("fork", number, theirs.fileno(), *shared)
        worker = WorkerProcess(number, NonblockingChannel(ours), mark, seat=seat)
        self._workers[number] = worker
        self._selector.register(ours, worker.events, lambda: self._on_worker_message(worker))

    def _listen(self, worker: WorkerProcess) -> None:
        """Wait for a worker's messages and, while bytes to it are unsent, until it accepts more."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.has_unsent else 0)
        if events != worker.events:
            worker.events = events
            self._selector.modify(worker.channel.connection, events, lambda: self._on_worker_message(worker))

    def _command(self, command: str, number: int, *descriptors: int) -> None:
        """Send a command to the fork server."""
        try:
            self._control.command(command, number, *descriptors)
        except OSError as error:
            raise _PoolError(FORK_SERVER_STOPPED) from error

    def _assign(self) -> None:
        for worker in sorted(self._workers.values(), key=lambda worker: len(worker.calls)):
            count = self._batch_size(worker) if worker.ready else 0
            if count:
                queue = self._queue if worker.seat is None else worker.seat.waiting
                worker.send([queue.popleft() for _ in range(count)], time.monotonic())
                self._listen(worker)

    def _batch_size(self, worker: WorkerProcess) -> int:
        """Return how many calls to send to a worker now: fewer as the queue empties, so that all workers end together."""
        if worker.seat is not None:
            return 0 if worker.calls else min(1, len(worker.seat.waiting))
        if self.concurrent > 1:
            return min(self.concurrent - len(worker.calls), math.ceil(len(self._queue) / self.processes))
        return 0 if worker.calls else min(self.at_once, math.ceil(len(self._queue) / (4 * self.processes)))

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next call is overdue; None if no call runs."""
        if self._control.read_ahead:
            return 0.0
        deadlines = [deadline for worker in self._workers.values() if (deadline := worker.next_deadline()) is not None]
        return max(0.0, min(deadlines) - time.monotonic()) + 0.001 if deadlines else None

    def _fail(self, call: PendingCall, kind: Literal["error", "timeout", "crash"], cause: str, seconds: float) -> None:
        """Count a failed attempt: retry the call, or set its outcome after the last one."""
        call.attempts += 1
        if call.seat is None and call.attempts <= self.retries and (kind != "timeout" or call.repeats_timeouts):
            self._queue.append(call)
        else:
            call.future.set_result(Failed(kind, cause, call.attempts, seconds))


class _PoolError(RuntimeError):
    """An error that ends the pool, with a message for users."""


def _readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))
