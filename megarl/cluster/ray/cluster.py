"""Trainers and engines as Ray actors, on one or many machines. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.cluster.base import Cluster, LeaveCheck, Service
from megarl.cluster.failures import ClusterError, Failure, ProcessInfo, ServiceDied
from megarl.cluster.keeper import KeeperAddress
from megarl.cluster.ray.devices import RayDevices, node_with, rank_environments
from megarl.cluster.ray.env import node_resource
from megarl.cluster.ray.group import RayGroup
from megarl.cluster.ray.ownership import END_SECONDS, owner_of
from megarl.cluster.ray.service import KILL_SECONDS, START_SECONDS, RayService, wait_for_end
from megarl.cluster.ray.signals import ray_wait
from megarl.cluster.ray.start_watch import StartWatch
from megarl.cluster.ray.stored_data import StoredData
from megarl.cluster.ray.watch import RayWatch, read_stacks_on_nodes
from megarl.cluster.sigstop_watch import LocalWatch
from megarl.cluster.stacks.report import GroupStacks
from megarl.cluster.starting import VARIABLE as PROCESS_VARIABLE
from megarl.cluster.starting import new_mark
from megarl.errors import ProcessFailure

CONCURRENT_CALLS = 100_000  # of one service; the engine has its own limit


class RayCluster(Cluster):
    """See `megarl.cluster.base.Cluster`.

    address: of a running cluster ("auto", host:port); None starts a private cluster on this machine;
    other machines cannot reach its ports. If this process is already connected to Ray, that connection is
    used and stays open.
    log_dir: directory of the output files, on the machine of each process.
    trainer_env: variables of every trainer.
    stall: `cluster.stall`.
    keeper: owner of the processes; None: this process, which starts or joins Ray.
    """

    def __init__(
        self,
        address: str | None,
        devices: RayDevices,
        log_dir: Path,
        *,
        trainer_env: dict[str, str],
        stall: float,
        keeper: KeeperAddress | None = None,
    ) -> None:
        self._devices, self._log_dir, self.stall = devices, log_dir, stall
        self._owner = owner_of(address, keeper)
        self.not_taken = self._owner.not_taken
        self.process_env = self._owner.env  # variables of every process
        self._trainer_env = trainer_env | self.process_env
        self._groups: list[RayGroup] = []
        self._services: list[RayService] = []
        self._stored = StoredData()
        self._service_watch: tuple[list[RayService], RayWatch | LocalWatch] | None = None
        self._start_watch = StartWatch(private=self._owner.private, limit=START_SECONDS)
        self._on_check: list[Callable[[], None]] = []
        self.requests: dict[str, Callable[[list[str]], Any]] = {}
        try:
            self._owner.connect()
            self._owner.reserve(devices)
        except BaseException:
            self.shutdown()
            raise

    def start_trainers(
        self,
        class_path: str,
        size: int,
        args: tuple[Any, ...],
        name: str = "trainer",
        *,
        essential: bool = True,
        settings: str = "",
    ) -> RayGroup:
        devices = self._devices.of_group(name)
        assert size == len(devices), f"{size} {name} processes, but {len(devices)} devices are reserved for them"
        nodes = [device.node_id for device in devices]
        if kept := self._owner.take_trainers([f"{name} rank {rank}" for rank in range(size)], settings):
            actors, places = [worker.actor for worker in kept], [worker.place for worker in kept]
            group = RayGroup(self, name, actors, places, nodes, essential=essential, kept=True)
            group.has_shutdown = all(worker.has_shutdown for worker in kept)
            self._groups.append(group)
            return group
        by_node = {device.node_id: [d for d in devices if d.node_id == device.node_id] for device in devices}
        actors, places, marks = [], [], [new_mark() for _ in devices]
        for rank, device in enumerate(devices):
            log = str(self._log_dir / f"{name}-{rank}.log")
            places.append(ProcessInfo(f"{name} rank {rank}", device.node_ip, log=log))  # until the reply of `where`
            visible = self._devices.visible(by_node[device.node_id])
            environment = self._trainer_env | visible | {PROCESS_VARIABLE: marks[rank]}
            options = self._devices.options(device) | _environment(environment)
            actors.append(self._owner.start("trainer", places[rank].name, options, (places[rank].name, log)))
        group = RayGroup(self, name, actors, places, nodes, essential=essential)
        self._groups.append(group)
        calls = [actor.where.remote(device.node_ip) for actor, device in zip(actors, devices, strict=True)]
        where = group.wait_for_start(calls, marks, private=self._owner.private)
        located = [place for place, _ in where]
        group = self._groups[-1] = RayGroup(self, name, actors, located, nodes, essential=essential)
        group.construct(class_path, args, rank_environments(devices, master_port=where[0][1]), settings)
        return group

    def end_trainers(self) -> None:
        groups, self._groups = self._groups, []
        ends = [end for group in groups for end in group.kill()]
        if ends:
            ray_wait(ends, num_returns=len(ends), timeout=KILL_SECONDS)
        alive = wait_for_end([pid for group in groups for pid in group.local_pids()], END_SECONDS)
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
        settings: str = "",
    ) -> RayService:
        if replaces is None:
            claimed = self._devices.claim(devices) if additional else self._devices.next_engine(devices)
        else:
            assert isinstance(replaces, RayService)
            if replaces.alive():
                replaces.kill(Failure.death(replaces.known_place, "it was ended, to start again"))
            replaces.stop()
            if replaces in self._services:
                self._services.remove(replaces)
            claimed = self._devices.replace_lost(replaces.devices)
        mark = new_mark()
        role_env = self._owner.env | env | self._devices.visible(claimed) | {PROCESS_VARIABLE: mark}
        options = self._devices.options(claimed[0]) | _environment(role_env)
        place = ProcessInfo(f"service {name}", claimed[0].node_ip, log=str(self._log_dir / f"{name}.log"))
        kept = self._owner.take_service(place.name, settings)
        concurrent = {"max_concurrency": CONCURRENT_CALLS, **options}
        actor = self._owner.start("service", place.name, concurrent) if kept is None else kept.actor
        service = RayService(
            actor,
            place,
            name,
            claimed,
            class_path,
            args,
            self._stored,
            mark=mark,
            settings=settings,
            kept=kept is not None,
            essential=essential,
        )
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
            if not living:  # its launcher ends the machine at this answer
                self._stored.copy_from(node)
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
        self._owner.watch.check()
        living = []
        for service in [service for service in self._services if not service.stopping]:
            failure = service.failure()
            if failure is not None and service.essential:
                raise ServiceDied(failure)
            living += [service] if failure is None else []
        self._check_starting([service for service in living if not (service.is_located() or service.was_killed)])
        self._check_stopped([service for service in living if service.is_located() and self._has_place(service)])
        # Only in a cluster of several machines, with services that the run outlives, can a machine be lost while the run goes on.
        if not self._owner.private and not all(service.essential for service in self._services):
            self._stored.mark_lost()
        for callback in self._on_check:
            callback()

    def _check_starting(self, services: list[RayService]) -> None:
        """Raise ServiceDied if an essential service is stopped or has ended before it has reported its place; kill another one."""
        self._start_watch.look({service.mark: service.node for service in services})
        for service in services:
            service.seen_place = self._start_watch.place(service.mark, service.seen_place)
            failure = self._start_watch.failure(service.mark, service.seen_place)
            if failure is None:
                continue
            if not service.essential:
                service.kill(replace(failure, died=True))
            self._start_watch.kill(service.mark, service.node, wait=service.essential)
            if service.essential:
                raise ServiceDied(failure)

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
            watch = local if self._owner.private else RayWatch(places, nodes, "the run", ServiceDied)
            if self._service_watch is not None:
                watch.detector.continue_from(self._service_watch[1].detector)
            self._service_watch = services, watch
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
        self._owner.watch.close()
        if self._owner.watch.failure is None:  # otherwise calls to Ray would hang, or end this process
            for group in groups:
                group.kill()
            stops = [(service, service.begin_stop()) for service in services]
            for service, refs in stops:
                service.finish_stop(refs)
            self._devices.release()
        self._owner.close()


def _environment(env: dict[str, str]) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": env}}
