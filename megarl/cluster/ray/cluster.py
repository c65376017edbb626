"""Trainers and engines as Ray actors, on one or many machines. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.base import Cluster, LeaveCheck, Service
from megarl.cluster.failures import (
    ClusterError,
    Failure,
    ProcessInfo,
    ServiceDied,
    WorkerFailed,
    collect,
    host_name,
    worker_failed,
)
from megarl.cluster.orphan_reaper import VARIABLE, OrphanReaper
from megarl.cluster.ray.actors import ServiceActor, TrainerActor
from megarl.cluster.ray.calls import Calls, PackedArguments
from megarl.cluster.ray.devices import RayDevices, is_alive, node_with, rank_environments
from megarl.cluster.ray.env import node_resource
from megarl.cluster.ray.failures import LEFT_BEFORE_START, not_started
from megarl.cluster.ray.processes import RayProcessWatch, private_processes
from megarl.cluster.ray.service import KILL_SECONDS, START_SECONDS, RayData, RayService, wait_for_end
from megarl.cluster.ray.signals import ray_wait
from megarl.cluster.ray.start import start
from megarl.cluster.ray.watch import RayWatch, read_stacks_on_nodes
from megarl.cluster.sigstop_watch import LocalWatch
from megarl.cluster.stacks.report import GroupStacks
from megarl.cluster.stacks.stall import StallWatch
from megarl.errors import ProcessFailure
from megarl.types import DataRef

PING_SECONDS = 0.1  # time for an idle trainer to reply to a ping; a later check waits for the rest
TRAINERS_END_SECONDS = 60.0  # time for killed trainers to end, which frees their memory
CONCURRENT_CALLS = 100_000  # of one service; the engine has its own limit


class RayGroup:
    """See `megarl.cluster.base.WorkerGroup`."""

    def __init__(
        self,
        cluster: RayCluster,
        name: str,
        actors: list[Any],
        places: list[ProcessInfo],
        nodes: list[str],
        *,
        essential: bool = True,
    ) -> None:
        self._cluster, self._name, self._actors, self._places, self.nodes = cluster, name, actors, places, nodes
        self.essential = essential
        self.failure: WorkerFailed | None = None  # see `megarl.cluster.base.WorkerGroup`
        self._call, self._call_began = "", 0.0  # the call that runs, for messages; "" if none does
        self._has_shutdown = False
        self._pings: Calls | None = None  # of the check in progress

    @property
    def size(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._wait_watched(self._start("call", [(method, args)] * self.size), method)

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        packed = PackedArguments().of(per_rank)
        return self._wait_watched(self._start("call_packed", [(method, data) for data in packed]), method)

    def scatter_with_data(
        self, method: str, per_rank: list[tuple[Any, ...]], parts: int
    ) -> list[tuple[Any, list[DataRef]]]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        methods = [actor.call_with_data.options(num_returns=1 + parts) for actor in self._actors]
        calls = [remote.remote(method, args, parts) for remote, args in zip(methods, per_rank, strict=True)]
        controls = self._wait_watched(Calls([refs[0] for refs in calls], self._places), method)
        return [(control, [RayData(ref) for ref in refs[1:]]) for control, refs in zip(controls, calls, strict=True)]

    def shutdown(self) -> None:
        if self._has_shutdown and self.failure is None:  # other ranks would wait for a dead one
            self._has_shutdown = False
            self.call("shutdown")
        self.kill()

    def kill(self) -> list[Any]:
        """Kill the processes. Returns references that are ready once Ray has noticed their end."""
        for actor in self._actors:
            ray.kill(actor)
        ends = [actor.ping.remote() for actor in self._actors]
        self._actors, self._pings = [], None
        return ends

    def local_pids(self) -> list[int]:
        """Process ids of the ranks on this machine."""
        return [place.pid for place in self._places if place.host == host_name()]

    def construct(self, class_path: str, args: tuple[Any, ...], env: list[dict[str, str]]) -> None:
        calls = self._start("construct", [(class_path, args, rank_env) for rank_env in env])
        self._has_shutdown = all(self._wait_watched(calls, "its start"))

    def _start(self, method: str, per_rank: list[tuple[Any, ...]]) -> Calls:
        """Call the actors' `method` with each rank's arguments."""
        calls = [getattr(actor, method).remote(*args) for actor, args in zip(self._actors, per_rank, strict=True)]
        return Calls(calls, self._places)

    def check(self) -> None:
        """Raise WorkerFailed if an idle rank has died; keep it as `failure` if the group is not essential."""
        if not self._actors or self.failure is not None:
            return
        if self._pings is None:
            self._pings = self._start("ping", [()] * self.size)
        failures = [answer for _, answer in self._pings.poll(PING_SECONDS) if isinstance(answer, Failure)]
        if failures and self.essential:
            raise worker_failed(failures)
        if failures:
            self.failure = worker_failed(failures)
        if not self._pings.unread:
            self._pings = None

    def wait_for_start(self, refs: list[Any]) -> list[Any]:
        """Run `wait` on the first call of each rank. Raises WorkerFailed if Ray does not start a process in time."""
        deadline, calls = time.monotonic() + START_SECONDS, Calls(refs, self._places)

        def check() -> None:
            self._cluster.check_services()
            for place, node in zip(self._places, self.nodes, strict=True):
                if not is_alive(node):
                    raise WorkerFailed(Failure.death(place, LEFT_BEFORE_START))
            if time.monotonic() > deadline:
                _, late = ray_wait(refs, num_returns=len(refs), timeout=0)
                ranks = [rank for rank, ref in enumerate(refs) if ref in late]
                note = f"\n{len(ranks)} of {len(refs)} processes were not started." if len(ranks) > 1 else ""
                raise WorkerFailed(not_started(self._places[ranks[0] if ranks else 0], START_SECONDS), note)

        return self.wait(calls, check)

    def _wait_watched(self, calls: Calls, doing: str) -> list[Any]:
        """Run `wait` with the watches of stopped processes and of progress. `doing`: the call's name, for messages."""
        watch, stall = RayWatch(self._places, self.nodes, doing), StallWatch(self.stacks, self._cluster.stall)

        def check() -> None:
            self._cluster.check_services()
            watch.check()
            stall.check()

        self._call, self._call_began = doing, time.monotonic()
        try:
            return self.wait(calls, check)
        finally:
            self._call = ""

    def stacks(self, full: bool) -> GroupStacks:
        """Read the states of the ranks. Callable from any thread."""
        call, seconds = self._call, time.monotonic() - self._call_began
        states = read_stacks_on_nodes([place.pid for place in self._places], self.nodes, full)
        return GroupStacks(self._name, self._places, states, call, seconds)

    def wait(self, calls: Calls, check: Callable[[], None] | None = None) -> list[Any]:
        """Wait for `calls` and return their values in rank order."""
        check = check or self._cluster.check_services
        try:
            return collect(self.size, lambda _, seconds: calls.poll(seconds), check)
        except ClusterError as error:
            if self.essential or not isinstance(error, WorkerFailed):
                self._cluster.shutdown()
            raise


class RayCluster(Cluster):
    """See `megarl.cluster.base.Cluster`.

    address: of a running cluster ("auto", host:port); None starts a private cluster on this machine;
    other machines cannot reach its ports. If this process is already connected to Ray, that connection is
    used and stays open.
    log_dir: directory of the output files, on the machine of each process.
    trainer_env: variables of every trainer.
    stall: `cluster.stall`.
    """

    def __init__(
        self,
        address: str | None,
        devices: RayDevices,
        log_dir: Path,
        *,
        trainer_env: dict[str, str],
        stall: float,
    ) -> None:
        self._devices, self._log_dir, self.stall = devices, log_dir, stall
        self._reaper = OrphanReaper()
        self._trainer_env = trainer_env | self._reaper.env
        self._groups: list[RayGroup] = []
        self._services: list[RayService] = []
        self._service_watch: tuple[list[RayService], RayWatch | LocalWatch] | None = None
        self._on_check: list[Callable[[], None]] = []
        self.requests: dict[str, Callable[[list[str]], Any]] = {}
        self._owns_ray, self._processes = not ray.is_initialized(), RayProcessWatch([])
        self._private = self._owns_ray and not address  # all processes are on this machine
        try:
            if self._owns_ray:
                start(address, self._reaper)
                self._processes = RayProcessWatch(private_processes())
            devices.reserve()
        except BaseException:
            self.shutdown()
            raise

    def start_trainers(
        self, class_path: str, size: int, args: tuple[Any, ...], name: str = "trainer", *, essential: bool = True
    ) -> RayGroup:
        devices = self._devices.of_group(name)
        assert size == len(devices), f"{size} {name} processes, but {len(devices)} devices are reserved for them"
        by_node = {device.node_id: [d for d in devices if d.node_id == device.node_id] for device in devices}
        actors, places = [], []
        for rank, device in enumerate(devices):
            places.append(ProcessInfo(f"{name} rank {rank}", device.node_ip))  # completed by the reply of `where`
            visible = self._devices.visible(by_node[device.node_id])
            options = self._devices.options(device) | _environment(self._trainer_env | visible)
            log = str(self._log_dir / f"{name}-{rank}.log")
            actors.append(ray.remote(TrainerActor).options(**options).remote(places[rank].name, log))
        nodes = [device.node_id for device in devices]
        group = RayGroup(self, name, actors, places, nodes, essential=essential)
        self._groups.append(group)
        calls = [actor.where.remote(device.node_ip) for actor, device in zip(actors, devices, strict=True)]
        where = group.wait_for_start(calls)
        located = [place for place, _ in where]
        group = self._groups[-1] = RayGroup(self, name, actors, located, nodes, essential=essential)
        group.construct(class_path, args, rank_environments(devices, master_port=where[0][1]))
        return group

    def end_trainers(self) -> None:
        groups, self._groups = self._groups, []
        ends = [end for group in groups for end in group.kill()]
        if ends:
            ray_wait(ends, num_returns=len(ends), timeout=KILL_SECONDS)
        alive = wait_for_end([pid for group in groups for pid in group.local_pids()], TRAINERS_END_SECONDS)
        if alive:
            raise ProcessFailure(
                f"killed trainers do not end (pid {', '.join(map(str, alive))}): they hang in a device or a file system of this "
                "machine, so that others cannot take their devices"
            )

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
    ) -> RayService:
        if replaces is None:
            claimed = self._devices.claim(devices) if additional else self._devices.next_engine(devices)
        else:
            assert isinstance(replaces, RayService)
            if replaces.alive():
                replaces.kill(Failure.death(replaces.place(), "it was ended, to start again"))
            replaces.stop()
            if replaces in self._services:
                self._services.remove(replaces)
            claimed = self._devices.replace_lost(replaces.devices)
        role_env = self._reaper.env | env | self._devices.visible(claimed)
        options = self._devices.options(claimed[0]) | _environment(role_env)
        actor = ray.remote(ServiceActor).options(max_concurrency=CONCURRENT_CALLS, **options).remote()
        place = ProcessInfo(f"service {name}", claimed[0].node_ip, log=str(self._log_dir / f"{name}.log"))
        service = RayService(actor, place, name, claimed, class_path, args, essential=essential)
        self._services.append(service)
        return service

    def release_service(self, service: Service) -> None:
        assert isinstance(service, RayService)
        service.stop()
        if service in self._services:
            self._services.remove(service)
            self._devices.give_back(service.devices)

    def free_services(self, devices: int) -> int | None:
        return self._devices.free(devices)

    def leave_machine(self, rank: int, agree: LeaveCheck) -> tuple[list[Service], str | None]:
        if (node := node_with(node_resource(rank))) is None:  # it has left
            return [], None
        if self._devices.has_trainers(node):
            return [], "trainers are on it"
        here = [service for service in self._services if service.node == node]
        fixed = [service.name for service in here if service.essential]
        living: list[Service] = [service for service in here if service.alive()]
        problem = f"{fixed[0]} is on it, which the run needs" if fixed else agree(living)
        if problem is None:
            self._devices.leave(node)
        return living, problem

    def on_check(self, callback: Callable[[], None]) -> None:
        self._on_check.append(callback)

    def check(self) -> None:
        try:
            self.check_services()
            for group in self._groups:
                group.check()
        except ClusterError:
            self.shutdown()
            raise

    def stacks(self) -> list[GroupStacks]:
        groups = [group.stacks(True) for group in list(self._groups)]
        services = [service for service in list(self._services) if service.is_located() and service.alive()]
        places, nodes = [service.place() for service in services], [service.node for service in services]
        states = read_stacks_on_nodes([place.pid for place in places], nodes, True)
        return [*groups, GroupStacks("service", places, states)]

    def check_services(self) -> None:
        """Raise ServiceDied if an essential service has ended or is stopped (SIGSTOP), or if a process of Ray has."""
        self._processes.check()
        living = []
        for service in [service for service in self._services if not service.stopping]:
            failure = service.failure()
            if failure is not None and service.essential:
                raise ServiceDied(failure)
            living += [service] if failure is None else []
        self._check_stopped([service for service in living if service.is_located() and self._has_place(service)])
        for callback in self._on_check:
            callback()

    @staticmethod
    def _has_place(service: RayService) -> bool:
        """Return False for a service that has just died before it replied, and is not essential."""
        try:
            return bool(service.place())
        except ServiceDied:
            if service.essential:
                raise
            return False

    def _check_stopped(self, services: list[RayService]) -> None:
        """Raise ServiceDied if an essential service is stopped; kill another one that is."""
        if self._service_watch is None or self._service_watch[0] != services:
            places, nodes = [service.place() for service in services], [service.node for service in services]
            local = LocalWatch(places, "the run", ServiceDied)
            self._service_watch = services, local if self._private else RayWatch(places, nodes, "the run", ServiceDied)
        try:
            self._service_watch[1].check()
        except ServiceDied as error:
            stopped = next(service for service in services if service.place() == error.failure.place)
            if stopped.essential:
                raise
            stopped.kill(replace(error.failure, died=True))

    def shutdown(self) -> None:
        self._on_check = []
        services, self._services = self._services, []
        groups, self._groups = self._groups, []
        self._processes.close()
        if self._processes.failure is not None:  # calls to Ray would hang, or end this process
            self._owns_ray = False
            self._reaper.close()
            return
        for group in groups:
            group.kill()
        stops = [(service, service.begin_stop()) for service in services]
        for service, refs in stops:
            service.finish_stop(refs)
        self._devices.release()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False
            os.environ.pop(VARIABLE, None)
        self._reaper.close()


def _environment(env: dict[str, str]) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": env}}
