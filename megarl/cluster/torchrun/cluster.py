"""Trainers that torchrun started, on one machine: rank 0 is the controller, the others serve its calls.

The calls travel over a Unix socket of their own, not over the trainers' process group: a rank that
waits idle runs into no collective's timeout, and one that dies in a collective is known at once.
Rank 0's own share runs in a thread, so that the controller can tell of a peer's death, or act on
Ctrl-C, while its device waits for that peer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.cluster.base import Service, load_class
from megarl.cluster.devices import LocalDevices
from megarl.cluster.failures import (
    ClusterError,
    Failure,
    Place,
    Returned,
    ServiceDied,
    collect,
    worker_failed,
)
from megarl.cluster.process import die_with_parent
from megarl.cluster.sigstop_watch import LocalWatch
from megarl.cluster.torchrun.local_service import LocalService
from megarl.cluster.torchrun.rank import JOIN_SECONDS, Call, Construct, Rank, Stop, socket_path
from megarl.cluster.torchrun.wire import Wire, packed
from megarl.types import DataRef, InlineData

TERMINATE_SECONDS = 3.0  # left to a failure to show after torchrun's SIGTERM
DEATH_SECONDS = 0.5  # left to a death to show that torchrun has seen first


class _Peer:
    """Another rank, seen from rank 0."""

    def __init__(self, wire: Wire, place: Place) -> None:
        self.wire, self.place = wire, place
        self.death: Failure | None = None
        self.answers: queue.SimpleQueue[Returned | Failure] = queue.SimpleQueue()
        self._letters: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def _read(self) -> None:
        while True:
            try:
                outcome = self.wire.receive()
            except EOFError:
                cause = "its process ended without a word (torchrun's report names the exit code or signal)"
                self.death = Failure.death(self.place, cause)
                self.answers.put(self.death)
                return
            self.answers.put(outcome if isinstance(outcome, Returned) else Failure.raised(self.place, outcome))

    def _write(self) -> None:
        while (letter := self._letters.get()) is not None:
            try:
                self.wire.send_packed(letter)
            except OSError:
                return  # the process is gone, and the reading thread has told

    def send(self, message: Any) -> None:
        """Waits for nothing: a process that is stopped does not read. Raises what pickle raises."""
        self._letters.put(packed(message))

    def finish(self) -> None:
        """Wait a moment until it has been sent everything."""
        self._letters.put(None)
        self._writer.join(TERMINATE_SECONDS)

    def wake(self) -> None:
        """Let it read, should it be stopped: torchrun would wait half a minute for it before it kills it."""
        with contextlib.suppress(OSError):  # it has ended, and its number is nobody's, or somebody else's
            os.kill(self.place.pid, signal.SIGCONT)


class _Self:
    """Rank 0's own share: a thread that answers as the other ranks do."""

    def __init__(self) -> None:
        self.place = Place("trainer rank 0", pid=os.getpid())
        self.answers: queue.SimpleQueue[Returned | Failure] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy = False
        self._thread = threading.Thread(target=self._serve, name="trainer-0", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        rank = Rank()
        while not isinstance(message := self._messages.get(), Stop):
            self.busy = True
            outcome = rank.answer(message)
            self.busy = False
            self.answers.put(outcome if isinstance(outcome, Returned) else Failure.raised(self.place, outcome))

    def send(self, message: Any) -> None:
        self._messages.put(message)

    def join(self) -> None:
        """Wait a moment for the thread: native code that the interpreter's end cuts off aborts the process."""
        self._thread.join(TERMINATE_SECONDS)


class TorchrunGroup:
    """See `megarl.cluster.base.WorkerGroup`."""

    def __init__(self, cluster: TorchrunCluster, ranks: list[_Self | _Peer]) -> None:
        self._cluster, self._ranks = cluster, ranks
        self._has_shutdown = False

    @property
    def size(self) -> int:
        return len(self._ranks)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.run([Call(method, args)] * self.size, method)

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        return self.run([Call(method, args) for args in per_rank], method)

    def scatter_with_data(
        self, method: str, per_rank: list[tuple[Any, ...]], parts: int
    ) -> list[tuple[Any, list[DataRef]]]:
        results = self.scatter(method, per_rank)
        assert all(len(data) == parts for _, data in results), f"{method} returned other than {parts} parts"
        return [(control, [InlineData(part) for part in data]) for control, data in results]

    def shutdown(self) -> None:
        if self._has_shutdown:
            self.call("shutdown")
        self._cluster.release_trainers(now=False)

    def construct(self, class_path: str, args: tuple[Any, ...], env: dict[str, str]) -> None:
        self.run([Construct(class_path, args, env)] * self.size, "its start")
        self._has_shutdown = hasattr(load_class(class_path), "shutdown")

    def run(self, messages: list[Construct | Call], doing: str) -> list[Any]:
        """What each rank answers. `doing`: what the call is, for messages."""
        watch = LocalWatch([rank.place for rank in self._ranks], doing)

        def check() -> None:
            self._cluster.check_others()
            watch.check()

        try:
            with self._cluster.waiting:
                for rank, message in zip(self._ranks, messages, strict=True):
                    rank.send(message)
                return collect(self.size, self._poll, check)
        except ClusterError:
            self._cluster.abort()
            raise

    def _poll(self, pending: set[int], seconds: float) -> list[tuple[int, Returned | Failure]]:
        ready = [(rank, self._ranks[rank].answers.get()) for rank in pending if not self._ranks[rank].answers.empty()]
        if ready:
            return ready
        first = min(pending)
        try:  # SPMD: all ranks answer at about the same time
            return [(first, self._ranks[first].answers.get(timeout=min(seconds, 0.05)))]
        except queue.Empty:
            return []


class _Waiting:
    """A SIGTERM while the group waits is torchrun telling of a dead peer: the cause is on its way."""

    def __init__(self) -> None:
        self._depth = 0
        self.terminated_at: float | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0

    def check(self) -> None:
        if self.terminated_at is not None and time.monotonic() > self.terminated_at + TERMINATE_SECONDS:
            raise SystemExit(128 + signal.SIGTERM)


class TorchrunCluster:
    """See `megarl.cluster.base.Cluster`; made in rank 0.

    trainers: how many ranks the recipe wants; None where none is called.
    log_dir: where processes write their output, but rank 0, which has the console.
    trainer_env, service_env: added to the environment of each, before what the caller gives.
    """

    def __init__(
        self,
        trainers: int | None,
        log_dir: Path,
        devices: LocalDevices,
        *,
        trainer_env: dict[str, str],
        service_env: dict[str, str],
    ) -> None:
        self._world_size = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        if local != self._world_size:
            raise ValueError(
                f"torchrun started {self._world_size} processes, {local} of them on this machine; the torchrun "
                "transport works inside one machine. For several, use launch/multinode.sh (Ray)."
            )
        if trainers not in (None, self._world_size):
            raise ValueError(
                f"cluster.trainers is {trainers}, and torchrun started {self._world_size} processes: "
                f"start it with --nproc-per-node {trainers}, or set cluster.trainers={self._world_size}."
            )
        self._log_dir, self._devices = log_dir, devices
        self._trainer_env, self._service_env = trainer_env, service_env
        self._services: list[LocalService] = []
        self._own = _Self()
        self._ranks: list[_Self | _Peer] = [self._own, *_listen(self._world_size)]
        self.waiting = _Waiting()
        die_with_parent(signal.SIGTERM)
        self._former_handler = signal.signal(signal.SIGTERM, self._on_terminate)

    def start_trainers(
        self, class_path: str, size: int, args: tuple[Any, ...], env: dict[str, str], name: str = "trainer"
    ) -> TorchrunGroup:
        # One group, whatever its name: the ranks that torchrun started are all there are.
        assert size == self._world_size, f"{size} trainers, connected for {self._world_size}"
        group = TorchrunGroup(self, self._ranks)
        group.construct(class_path, args, self._trainer_env | env)
        return group

    def start_service(
        self, class_path: str, args: tuple[Any, ...], *, name: str, devices: int, env: dict[str, str]
    ) -> Service:
        environment = self._service_env | self._devices.claim(devices) | env
        log = self._log_dir / f"{name}.log"
        service = LocalService(class_path, args, name=name, log=log, env=environment)
        self._services.append(service)
        return service

    def check(self) -> None:
        try:
            self._check_deaths()
        except ClusterError:
            self.abort()
            raise

    def check_others(self) -> None:
        """Raise for what else than a rank has failed while the ranks are waited for."""
        for service in self._services:
            if service.failure is not None and not service.stopping:
                raise ServiceDied(service.failure)
        self.waiting.check()

    def _check_deaths(self) -> None:
        self.check_others()
        deaths = [rank.death for rank in self._ranks if isinstance(rank, _Peer) and rank.death is not None]
        if deaths:
            raise worker_failed(deaths)

    def _on_terminate(self, number: int, _frame: FrameType | None) -> None:
        """torchrun's word that a rank has died, or anyone's that the run is to end. What it interrupts may hold
        a lock, so it ends nothing itself: what it raises leaves the ``with`` of this cluster."""
        if self.waiting:
            self.waiting.terminated_at = time.monotonic()
            return
        self._ignore_terminate()
        deadline = time.monotonic() + DEATH_SECONDS
        while time.monotonic() < deadline:
            self._check_deaths()
            time.sleep(0.02)
        raise SystemExit(128 + number)

    def _ignore_terminate(self) -> None:
        """It is being acted on: torchrun sends it once more for each rank that ends, and kills later."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._former_handler = signal.SIG_IGN

    def release_trainers(self, *, now: bool) -> None:
        """Let every rank return from `serve`; with `now`, end the others in the middle of a call. Idempotent."""
        if not self._ranks:
            return
        ranks, self._ranks = self._ranks, []
        peers = [rank for rank in ranks if isinstance(rank, _Peer)]
        for rank in ranks:
            rank.send(Stop(now))
        for peer in peers:
            if now:
                peer.wake()
            peer.finish()
        self._own.join()

    def abort(self) -> None:
        """End everything at once, after a failure that this process goes on to report."""
        self._ignore_terminate()
        self.release_trainers(now=True)
        self.shutdown()

    def shutdown(self) -> None:
        self.release_trainers(now=self._own.busy)
        for service in self._services:
            service.begin_stop()
        for service in self._services:
            service.stop()
        self._services = []
        signal.signal(signal.SIGTERM, self._former_handler)

    def __enter__(self) -> TorchrunCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _listen(world_size: int) -> list[_Peer]:
    """Wait until every other rank has called; in rank order."""
    if world_size == 1:
        return []
    path = socket_path()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise ValueError(f"{path.parent} exists and is open to other users: remove it.")
    path.unlink(missing_ok=True)  # of an earlier run that was killed
    called: dict[int, _Peer] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(world_size)
            while len(called) < world_size - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                wire = Wire(listener.accept()[0])
                rank, place = wire.receive()
                called[rank] = _Peer(wire, place)
    except TimeoutError as error:
        missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in called)
        raise TimeoutError(f"trainer ranks {missing} did not call the controller in {JOIN_SECONDS:.0f} s.") from error
    finally:
        shutil.rmtree(path.parent)
    return [called[rank] for rank in sorted(called)]
