"""Trainers that torchrun started, on one machine: rank 0 is the controller, the other ranks serve its calls.

Calls use a Unix socket, not the trainers' process group: an idle rank does not run into the timeout of a
collective, and the death of a rank in a collective is noticed at once.
Rank 0's trainer runs in a thread, so that the controller can report a peer's death or react to Ctrl-C while the
trainer waits for that peer in a collective.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.cluster.base import Cluster, Service, load_class
from megarl.cluster.devices import LocalDevices
from megarl.cluster.failures import (
    ClusterError,
    Failure,
    Returned,
    ServiceDied,
    WorkerFailed,
    collect,
    worker_failed,
)
from megarl.cluster.process import die_with_parent
from megarl.cluster.sigstop_watch import LocalWatch
from megarl.cluster.stacks.capture import capture
from megarl.cluster.stacks.channel import read_stacks, with_system_facts
from megarl.cluster.stacks.report import GroupStacks
from megarl.cluster.stacks.stall import StallWatch
from megarl.cluster.torchrun.local_service import LocalService
from megarl.cluster.torchrun.peers import TERMINATE_SECONDS, LocalRank, PeerRank, listen
from megarl.cluster.torchrun.rank import CallMessage, ConstructMessage, StopMessage
from megarl.types import DataRef, InlineData

DEATH_SECONDS = 2.0  # time until the controller also notices a death that torchrun noticed first


class TorchrunGroup:
    """See `megarl.cluster.base.WorkerGroup`."""

    def __init__(self, cluster: TorchrunCluster, ranks: list[LocalRank | PeerRank]) -> None:
        self._cluster, self._ranks = cluster, ranks
        self._has_shutdown = self.kept = False
        self.failure: WorkerFailed | None = None  # never set: every failure ends the run
        self._call, self._call_began = "", 0.0  # the call that runs, for messages; "" if none does

    @property
    def size(self) -> int:
        return len(self._ranks)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.run([CallMessage(method, args)] * self.size, method)

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        return self.run([CallMessage(method, args) for args in per_rank], method)

    def scatter_with_data(
        self, method: str, per_rank: Sequence[tuple[Any, ...] | None], parts: int
    ) -> list[tuple[Any, list[DataRef]] | None]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        results = self.run([args if args is None else CallMessage(method, args) for args in per_rank], method)
        assert all(len(result[1]) == parts for result in results if result), f"{method} did not return {parts} parts"
        return [None if result is None else (result[0], [InlineData(part) for part in result[1]]) for result in results]

    def shutdown(self) -> None:
        if self._has_shutdown:
            self.call("shutdown")
        self._cluster.release_trainers(now=False)

    def construct(self, class_path: str, args: tuple[Any, ...], env: dict[str, str]) -> None:
        self.run([ConstructMessage(class_path, args, env)] * self.size, "its start")
        self._has_shutdown = hasattr(load_class(class_path), "shutdown")

    def run(self, messages: Sequence[ConstructMessage | CallMessage | None], doing: str) -> list[Any]:
        """Send each rank its message and return the values in rank order. `doing`: the call's name, for messages.

        A rank with None as its message is not called, and its value is None.
        """
        watch, stall = (
            LocalWatch([rank.place for rank in self._ranks], doing),
            StallWatch(self.stacks, self._cluster.stall),
        )

        def check() -> None:
            self._cluster.check_others()
            watch.check()
            stall.check()

        self._call, self._call_began = doing, time.monotonic()
        try:
            with self._cluster.waiting:
                for rank, message in zip(self._ranks, messages, strict=True):
                    if message is not None:
                        rank.send(message)
                called = [rank for rank, message in enumerate(messages) if message is not None]
                return collect(self.size, self._poll, check, called)
        except ClusterError:
            self._cluster.abort()
            raise
        finally:
            self._call = ""

    def stacks(self, full: bool) -> GroupStacks:
        """Read the states of the ranks. Callable from any thread."""
        places, call, seconds = [rank.place for rank in self._ranks], self._call, time.monotonic() - self._call_began
        states = [with_system_facts(os.getpid(), capture(full), full)]  # of rank 0: this process
        states[0]["cpu_ticks"] = 0  # its child processes are the engines
        states += read_stacks([place.pid for place in places[1:]], full)
        return GroupStacks("trainer", places, states, call, seconds)

    def _poll(self, pending: set[int], seconds: float) -> list[tuple[int, Returned | Failure]]:
        ready = [(rank, self._ranks[rank].answers.get()) for rank in pending if not self._ranks[rank].answers.empty()]
        if ready:
            return ready
        first = min(pending)
        try:  # SPMD: all ranks reply at about the same time
            return [(first, self._ranks[first].answers.get(timeout=min(seconds, 0.05)))]
        except queue.Empty:
            return []


class _Waiting:
    """Marks when the group waits for its ranks: a SIGTERM then means that torchrun noticed a dead peer.

    The wait goes on for `TERMINATE_SECONDS`, because the cause arrives later over the sockets.
    """

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
        """Raise SystemExit once the wait after a SIGTERM is over; once, since the run's end may wait for a checkpoint."""
        if self.terminated_at is not None and time.monotonic() > self.terminated_at + TERMINATE_SECONDS:
            self.terminated_at = None
            raise SystemExit(128 + signal.SIGTERM)


class TorchrunCluster(Cluster):
    """See `megarl.cluster.base.Cluster`; exists in rank 0 only.

    trainers: number of ranks that the recipe needs; None if the command starts no trainers.
    log_dir: directory of the output files; rank 0 writes to the console.
    trainer_env: variables of every trainer; the caller's `env` overrides them.
    stall: `cluster.stall`.
    """

    def __init__(
        self,
        trainers: int | None,
        log_dir: Path,
        devices: LocalDevices,
        *,
        trainer_env: dict[str, str],
        stall: float,
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
        self._trainer_env, self.stall = trainer_env, stall
        self._group: TorchrunGroup | None = None
        self._services: list[LocalService] = []
        self.requests: dict[str, Callable[[list[str]], Any]] = {}
        self.not_taken: list[str] = []  # torchrun keeps none
        self._service_watch: tuple[list[LocalService], LocalWatch] | None = None
        self._claimed: dict[str, dict[str, str]] = {}  # by service: the variables that show it its devices
        self._on_check: list[Callable[[], None]] = []
        self._local_rank = LocalRank()
        self._ranks: list[LocalRank | PeerRank] = [self._local_rank, *listen(self._world_size)]
        self.waiting = _Waiting()
        die_with_parent(signal.SIGTERM)
        self._former_handler = signal.signal(signal.SIGTERM, self._on_terminate)

    def start_trainers(
        self,
        class_path: str,
        size: int,
        args: tuple[Any, ...],
        name: str = "trainer",
        *,
        essential: bool = True,
        settings: str = "",
    ) -> TorchrunGroup:
        # torchrun's ranks form the only group, so `name` has no effect. They end with the controller, and so has `settings`.
        assert size == self._world_size, f"{size} trainers, but torchrun started {self._world_size} processes"
        group = self._group = TorchrunGroup(self, self._ranks)
        group.construct(class_path, args, self._trainer_env)
        return group

    def start_service(
        self,
        class_path: str,
        args: tuple[Any, ...],
        *,
        name: str,
        devices: int,
        env: dict[str, str],
        replaces: Service | None = None,
        essential: bool = True,
        additional: bool = False,
        settings: str = "",
    ) -> Service:
        assert not additional, "the devices under torchrun are fixed"
        if replaces is None:
            claimed = self._devices.claim(devices)
        else:
            assert isinstance(replaces, LocalService)
            if replaces.alive():
                replaces.kill(Failure.death(replaces.known_place, "it was ended, to start again"))
            replaces.stop()
            self._services.remove(replaces)
            claimed = self._claimed[name]
        self._claimed[name] = claimed
        log = self._log_dir / f"{name}.log"
        service = LocalService(
            class_path,
            args,
            name=name,
            log=log,
            env=claimed | env,
            essential=essential,
            device_names=next(iter(claimed.values()), ""),
        )
        self._services.append(service)
        return service

    def on_check(self, callback: Callable[[], None]) -> None:
        self._on_check.append(callback)

    def check(self) -> None:
        try:
            self._check_deaths()
        except ClusterError:
            self.abort()
            raise

    def stacks(self) -> list[GroupStacks]:
        places = [service.known_place for service in list(self._services) if service.alive()]
        services = GroupStacks("service", places, read_stacks([place.pid for place in places], True))
        return [*([self._group.stacks(True)] if self._group is not None else []), services]

    def check_others(self) -> None:
        """Raise if an essential service has failed or is stopped (SIGSTOP), or if the time after torchrun's SIGTERM is over."""
        services = [service for service in self._services if not service.stopping]
        for service in services:
            failure = service.failure() if service.essential else None
            if failure is not None:
                raise ServiceDied(failure)
        self._check_stopped([service for service in services if service.alive()])
        self.waiting.check()
        for callback in self._on_check:
            callback()

    def _check_stopped(self, services: list[LocalService]) -> None:
        """Raise ServiceDied if an essential service is stopped; kill another one that is."""
        if self._service_watch is None or self._service_watch[0] != services:
            places = [service.known_place for service in services]
            watch = LocalWatch(places, "the run", ServiceDied)
            if self._service_watch is not None:
                watch.detector.continue_from(self._service_watch[1].detector)
            self._service_watch = services, watch
        try:
            self._service_watch[1].check()
        except ServiceDied as error:
            stopped = next(service for service in services if service.known_place == error.failure.place)
            if stopped.essential:
                raise
            stopped.kill(replace(error.failure, died=True))

    def _check_deaths(self) -> None:
        self.check_others()
        deaths = [rank.death for rank in self._ranks if isinstance(rank, PeerRank) and rank.death is not None]
        if deaths:
            raise worker_failed(deaths)

    def _on_terminate(self, number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM, sent by torchrun after the death of a rank, or by a user or cluster manager.

        The interrupted code may hold a lock, so the handler ends no process: it raises, and the cluster's ``with``
        block ends them.
        """
        if self.waiting:
            self.waiting.terminated_at = time.monotonic()
            return
        self._on_check = []  # a callback may need a lock that the interrupted code holds
        self._ignore_terminate()
        deadline = time.monotonic() + DEATH_SECONDS
        while time.monotonic() < deadline:
            self._check_deaths()
            time.sleep(0.02)
        raise SystemExit(128 + number)

    def _ignore_terminate(self) -> None:
        """Ignore further SIGTERMs: torchrun sends one more for each rank that ends, and SIGKILL later."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._former_handler = signal.SIG_IGN

    def release_trainers(self, *, now: bool) -> None:
        """Let every rank return from `serve`; with `now`, end the other ranks even during a call. Idempotent."""
        if not self._ranks:
            return
        ranks, self._ranks = self._ranks, []
        peers = [rank for rank in ranks if isinstance(rank, PeerRank)]
        for rank in ranks:
            rank.send(StopMessage(now))
        for peer in peers:
            if now:
                peer.wake()
            peer.finish()
        self._local_rank.join()

    def abort(self) -> None:
        """End all processes at once after a failure, which this process then reports."""
        self._ignore_terminate()
        self.release_trainers(now=True)
        self.shutdown()

    def shutdown(self) -> None:
        self._on_check = []
        self.release_trainers(now=self._local_rank.busy)
        for service in self._services:
            service.begin_stop()
        for service in self._services:
            service.stop()
        self._services = []
        signal.signal(signal.SIGTERM, self._former_handler)
