"""Engines and other services as Ray actors. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from megarl.cluster.failures import (
    CallFailed,
    Failure,
    ProcessInfo,
    Raised,
    Returned,
    ServiceDied,
    host_name,
)
from megarl.cluster.ray.actors import ConstructorFailed
from megarl.cluster.ray.devices import ReservedDevice, is_alive
from megarl.cluster.ray.failures import LEFT_BEFORE_START, death_cause, located, not_started
from megarl.cluster.ray.signals import ray_get, ray_wait
from megarl.cluster.ray.stored_data import RayData, StoredData

START_SECONDS = 300.0  # time for Ray to start a process on its reserved device
STOP_SECONDS = 5.0  # time for an object's shutdown() before its process is killed
KILL_SECONDS = 10.0  # time for a killed process to end


def wait_for_end(pids: Sequence[int], seconds: float) -> list[int]:
    """Wait until these processes of this machine have ended, for `seconds` at most. Returns the pids that still run. A pid of 0 is
    unknown, and left out."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


class RayService:
    """See `megarl.cluster.base.Service`."""

    def __init__(
        self,
        actor: Any,
        place: ProcessInfo,
        name: str,
        devices: list[ReservedDevice],
        class_path: str,
        args: tuple[Any, ...],
        stored: StoredData,
        *,
        mark: str = "",
        settings: str = "",
        kept: bool = False,
        essential: bool = True,
    ) -> None:
        """devices: those of the process, all of one machine. stored: receives the data that its calls return. mark: of its start
        (`megarl.cluster.starting`). settings, essential: see `Cluster.start_service`. kept: the process serves another controller now, and
        its object is constructed."""
        self.name, self.address, self.node = name, devices[0].node_ip, devices[0].node_id
        self.devices, self.essential, self.kept = devices, essential, kept
        self.mark, self.seen_place = mark, place  # the place as far as it is known before the first reply
        self._actor, self._place, self._stored = actor, place, stored
        self._killed_because: Failure | None = None
        self.stopping = False
        self._deadline = time.monotonic() + START_SECONDS
        self._where = actor.where.remote(place.name, place.log)
        if not kept:
            actor.construct.remote(class_path, args, place.name, place.log, settings)
        self._lifetime = actor.lifetime.remote()
        self._constructed = actor.constructed.remote()

    @property
    def host(self) -> str:
        """The machine of the process. Waits until the process has started, for `START_SECONDS` at most."""
        return self.place().host

    @property
    def known_place(self) -> ProcessInfo:
        return self._place if self._place.pid else self.seen_place

    @property
    def device_names(self) -> str:
        return ",".join(device.id for device in self.devices)

    def place(self) -> ProcessInfo:
        """Wait until the process has started and return its place. Raises ServiceDied if it does not start."""
        if not self._place.pid:
            try:
                self._place = ray_get(self._where, timeout=max(0.0, self._deadline - time.monotonic()))
            except RayActorError as error:
                raise ServiceDied(Failure.death(located(self.known_place, error), death_cause(error))) from error
            except GetTimeoutError as error:
                raise ServiceDied(not_started(self.known_place, START_SECONDS)) from error
        return self._place

    def is_located(self) -> bool:
        """Return whether `place` returns at once."""
        return bool(self._place.pid) or bool(ray_wait([self._where], timeout=0)[0])

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._chain(self._actor.call.remote(method, args), lambda value: value)

    def call_with_data(self, method: str, *args: Any) -> Future[Any]:
        control, data = self._actor.call_with_data.options(num_returns=2).remote(method, args)
        return self._chain(control, lambda value: (value, self._data(data)))

    def call_with_parts(self, method: str, parts: int) -> Future[Any]:
        control, *data = self._actor.call_with_parts.options(num_returns=1 + parts).remote(method, parts)

        def located(value: tuple[Any, int]) -> tuple[Any, list[RayData]]:
            return value[0], [self._data(ref) for ref in data[: value[1]]]

        return self._chain(control, located)

    def _data(self, ref: Any) -> RayData:
        return self._stored.add(ref, self.node, f"{self.known_place.name} on {self.known_place.host}")

    def alive(self) -> bool:
        return self.failure() is None

    def failure(self) -> Failure | None:
        """The failure that ended the service; None while it is alive."""
        ready, _ = ray_wait([self._lifetime, self._constructed], num_returns=2, timeout=0)
        for ref in ready:
            try:
                outcome = ray_get(ref)
            except RayActorError as error:
                return self._death(error)
            if isinstance(outcome, Raised):
                return Failure.raised(self.place(), outcome)
        if not self.is_located():
            if not is_alive(self.node):
                return Failure.death(self.known_place, LEFT_BEFORE_START)
            if time.monotonic() > self._deadline:
                return not_started(self.known_place, START_SECONDS)
        return None

    def stop(self) -> None:
        """End the process and wait until it has ended, for `KILL_SECONDS` at most: others may take its device memory."""
        self.finish_stop(self.begin_stop())
        deadline = time.monotonic() + KILL_SECONDS
        ray_wait([self._lifetime], timeout=KILL_SECONDS)  # `ray.kill` returns before the process has ended
        if self.known_place.host == host_name():  # Ray reports the end before the system does
            wait_for_end([self.known_place.pid], deadline - time.monotonic())

    @property
    def was_killed(self) -> bool:
        """Return whether `kill` was called; Ray may not have reported the end yet."""
        return self._killed_because is not None

    def kill(self, because: Failure) -> None:
        """Kill the process; `because` is then its failure."""
        self._killed_because = because
        ray.kill(self._actor)

    def begin_stop(self) -> list[Any]:
        """Request the end without waiting; returns the references for `finish_stop`."""
        if self.stopping or not self.alive():
            return []
        self.stopping = True
        return [self._actor.stop.remote()]

    def finish_stop(self, refs: list[Any]) -> None:
        if refs:
            ray_wait(refs, timeout=STOP_SECONDS)
        ray.kill(self._actor)

    def _death(self, error: RayActorError) -> Failure:
        if self._killed_because is not None:
            return self._killed_because
        # `_place` is incomplete until the reply of `where` has been read.
        if not self._place.pid and ray_wait([self._where], timeout=0)[0]:
            try:
                self._place = ray_get(self._where)
            except RayActorError:
                return Failure.death(located(self.known_place, error), death_cause(error))
        return Failure.death(self.known_place, "it was stopped" if self.stopping else death_cause(error))

    def _chain(self, ref: Any, convert: Callable[[Any], Any]) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # an answer will come: it cannot be cancelled

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None and isinstance(done.result(), Returned):
                result.set_result(convert(done.result().value))
            else:
                # `_fail` calls Ray and may block; the present thread delivers Ray's results and must not.
                threading.Thread(target=self._fail, args=(result, done), daemon=True).start()

        ref.future().add_done_callback(settle)
        return result

    def _fail(self, result: Future[Any], done: Future[Any]) -> None:
        try:
            result.set_exception(self._failure_of(done))
        except Exception as error:  # noqa: BLE001 -- Ray itself failed: without an exception, the caller would wait for ever
            result.set_exception(ServiceDied(Failure.raised(self.known_place, Raised.of(error))))

    def _failure_of(self, done: Future[Any]) -> CallFailed | ServiceDied:
        error = done.exception()
        if error is None:
            kind = ServiceDied if isinstance(done.result(), ConstructorFailed) else CallFailed
            return kind(Failure.raised(self.place(), done.result()))
        failure = self.failure()
        if failure is None and isinstance(error, RayActorError):
            failure = self._death(error)
        if failure is None:
            return CallFailed(Failure.raised(self.place(), Raised.of(error)))
        return ServiceDied(failure)
