"""A service (an engine's process) as a child on this machine, connected by a socket pair; its death fails every call."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megarl.cluster.base import host_name
from megarl.cluster.failures import (
    CallFailed,
    Failure,
    ProcessInfo,
    Raised,
    Returned,
    ServiceDied,
    exit_cause,
)
from megarl.cluster.orphan_reaper import OrphanReaper
from megarl.cluster.process import child_environment
from megarl.cluster.service import CONSTRUCTED, ServiceCall, ServiceStart, ServiceStop
from megarl.cluster.wire import SendQueue, UnreadableMessage, Wire
from megarl.types import InlineData

STOP_SECONDS = 5.0  # time for an object's shutdown() before its process is killed


class LocalService:
    """See `megarl.cluster.base.Service`. Token data returns over the socket, as `InlineData`.

    class_path: "package.module:Class"; args: picklable arguments of its constructor.
    log: output file of the process.
    env: variables added to this process's environment, from which torchrun's variables are removed.
    essential: see `Cluster.start_service`. device_names: see `Service`.
    """

    def __init__(
        self,
        class_path: str,
        args: tuple[Any, ...],
        *,
        name: str,
        log: Path,
        env: dict[str, str] | None = None,
        essential: bool = True,
        device_names: str = "",
    ) -> None:
        self.name, self.essential = name, essential
        self.host = host_name()
        self.address = "127.0.0.1"  # all of this cluster is on this machine
        self.device_names = device_names
        self._reaper = OrphanReaper()
        local, remote = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.cluster.torchrun.service_main", str(remote.fileno())],
            env=child_environment({**(env or {}), **self._reaper.env}),
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a new process group, which ends together and does not receive Ctrl-C
        )
        remote.close()
        self.known_place = ProcessInfo(f"service {name}", self.host, self._process.pid, str(log))
        self._wire = Wire(local)
        self._outgoing = SendQueue(self._wire)
        self._numbers = itertools.count(CONSTRUCTED + 1)
        self._lock = threading.Lock()  # protects _waiting and _failure
        self._waiting: dict[int, tuple[Future[Any], Callable[[Any], Any]]] = {}
        self._failure: Failure | None = None
        self._killed_because: Failure | None = None
        self.stopping = self.kept = False
        self._reader = threading.Thread(target=self._read, name=f"service-{name}", daemon=True)
        self._outgoing.send(ServiceStart(class_path, args, self.known_place.name, str(log)))
        self._reader.start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._call(method, args, lambda value: value)

    def call_with_data(self, method: str, *args: Any) -> Future[Any]:
        return self._call(method, args, _with_data)

    def call_with_parts(self, method: str, parts: int) -> Future[Any]:
        return self._call(method, (parts,), _with_parts)

    def failure(self) -> Failure | None:
        return self._failure

    def alive(self) -> bool:
        return self._failure is None

    def kill(self, because: Failure) -> None:
        """Kill the process; `because` is then its failure."""
        self._killed_because = because
        self._process.kill()

    def stop(self) -> None:
        self.begin_stop()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reaper.close()
        self._reader.join()
        self._outgoing.finish(STOP_SECONDS)
        self._wire.close()

    def begin_stop(self) -> None:
        """Request the end of the process without waiting, so that several services end in parallel."""
        if not self.stopping:
            self.stopping = True
            self._outgoing.send(ServiceStop())

    def _call(self, method: str, args: tuple[Any, ...], convert: Callable[[Any], Any]) -> Future[Any]:
        """Start a call. convert: returns the future's result from the returned value."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # an answer will come: it cannot be cancelled
        with self._lock:
            if self._failure is not None:
                future.set_exception(ServiceDied(self._failure))
                return future
            number = next(self._numbers)
            self._waiting[number] = future, convert
        try:
            self._outgoing.send(ServiceCall(number, method, args))
        except BaseException:  # the arguments do not pickle: no reply will come
            with self._lock:
                self._waiting.pop(number, None)
            raise
        return future

    def _read(self) -> None:
        constructor_error = None
        while True:
            try:
                number, outcome = self._wire.receive()
            except EOFError:
                break
            except UnreadableMessage as error:  # which call it answers is unknown
                self.kill(Failure.raised(self.known_place, Raised.of(error)))
                break
            if number == CONSTRUCTED:
                constructor_error = outcome if isinstance(outcome, Raised) else None
                continue
            with self._lock:
                future, convert = self._waiting.pop(number)
            if isinstance(outcome, Returned):
                future.set_result(convert(outcome.value))
            else:
                future.set_exception(CallFailed(Failure.raised(self.known_place, outcome)))
        self._end(constructor_error)

    def _end(self, constructor_error: Raised | None) -> None:
        """Record why the process has ended and fail all pending calls."""
        returncode = self._process.wait()
        if constructor_error is not None:
            failure = Failure.raised(self.known_place, constructor_error)
        else:
            cause = "it was stopped" if self.stopping else exit_cause(returncode)
            failure = self._killed_because or Failure.death(self.known_place, cause)
        with self._lock:
            self._failure = failure
            waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            future.set_exception(ServiceDied(failure))


def _with_data(value: Any) -> tuple[Any, InlineData]:
    control, samples = value
    return control, InlineData(samples)


def _with_parts(value: Any) -> tuple[Any, list[InlineData]]:
    control, vectors = value
    return control, [InlineData(samples) for samples in vectors]
