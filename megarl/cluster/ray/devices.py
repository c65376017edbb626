"""Reserve the devices of a Ray cluster for trainers, critic and engines, in one placement group."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # no public API returns a node's free resources
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.cluster.device_map import Demand, DeviceMap, Slot, place, place_on_cpus
from megarl.cluster.failures import MachineLost
from megarl.cluster.ray.signals import ray_get

# Share of a device that a process reserves in Ray: less than a third, so that a time-shared device fits an actor trainer,
# a critic trainer and an engine. Ray does not enforce it.
SHARE = 0.3
_RESERVE_SECONDS = 60.0
_ASK_SECONDS = 1.0


CreateGroup = Callable[[list[dict[str, float]], list[dict[str, str]]], PlacementGroup]
"""Creates a placement group from the resources and the labels of the nodes of its bundles."""


def _create_group(bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> PlacementGroup:
    return placement_group(bundles, bundle_label_selector=selectors)


@dataclass(frozen=True)
class ReservedDevice:
    """One device, reserved by one bundle of a placement group; without a group, a process that needs no device."""

    node_id: str
    node_ip: str
    group: PlacementGroup | None = None
    bundle: int = 0
    id: str = ""  # number of the device in the driver of its node


@dataclass(frozen=True)
class Reservation:
    """The devices of a run when they have just been reserved, for its next controller (`train.keep_workers`)."""

    demand: Demand
    trainers: list[ReservedDevice]
    critics: list[ReservedDevice]
    engines: list[list[ReservedDevice]]
    groups: list[PlacementGroup]


class RayDevices:
    """The devices of one run.

    resource: Ray's name of the device ("GPU", ...); None if processes need no device: they are spread over
    machines by number of CPUs, without a reservation.
    variable: the visible-devices variable; "" if the platform has none.
    """

    def __init__(self, resource: str | None, variable: str, demand: Demand) -> None:
        self._resource, self._variable, self._demand = resource, variable, demand
        self._reservations: list[PlacementGroup] = []
        self.trainers: list[ReservedDevice] = []  # in rank order
        self._critics: list[ReservedDevice] = []  # in rank order
        self._engines: list[list[ReservedDevice]] = []  # of engines that have not started; fixed models' engines last
        self._leaving: set[str] = set()  # ids of nodes that get no further process
        self._create: CreateGroup = _create_group
        self._on_change: Callable[[], None] = lambda: None

    def reserve(self, create: CreateGroup = _create_group, on_change: Callable[[], None] = lambda: None) -> None:
        """Reserve the devices of the run. Raises ValueError if the cluster has too few.

        create: creates placement groups. on_change: called when processes have moved to other devices since.
        """
        self._create, self._on_change, nodes = create, on_change, living_nodes()
        if self._resource is None:
            plan = place_on_cpus([int(node["Resources"].get("CPU", 0)) for node in nodes], self._demand)
            devices = {slot: _device(nodes[slot[0]]) for slot in plan.parts(separate_engines=False)[0]}
        else:
            free = available_resources_per_node()
            machines = [
                (node["NodeManagerAddress"], int(free.get(node["NodeID"], {}).get(self._resource, 0))) for node in nodes
            ]
            plan = place(machines, self._demand, self._resource)
            devices = self._reserve(nodes, plan)
        self.trainers = [devices[slot] for slot in plan.trainers]
        self._critics = [devices[slot] for slot in plan.critics]
        self._engines = [[devices[slot] for slot in slots] for slots in [*plan.engines, *plan.fixed]]

    def reservation(self) -> Reservation:
        """Return the devices that `reserve` has just reserved."""
        groups = [*self._reservations]
        return Reservation(self._demand, self.trainers, self._critics, [*self._engines], groups)

    def adopt(
        self,
        reservation: Reservation,
        create: CreateGroup = _create_group,
        on_change: Callable[[], None] = lambda: None,
    ) -> bool:
        """Take the devices of an earlier controller instead of `reserve`. Returns False if the run needs others now, or if one of
        their machines has left the cluster."""
        nodes = {node["NodeID"] for node in living_nodes()}
        devices = [
            *reservation.trainers,
            *reservation.critics,
            *(each for engine in reservation.engines for each in engine),
        ]
        if reservation.demand != self._demand or not nodes.issuperset(device.node_id for device in devices):
            return False
        self._create, self._on_change, self._reservations = create, on_change, [*reservation.groups]
        self.trainers, self._critics = reservation.trainers, reservation.critics
        self._engines = [*reservation.engines]
        return True

    def of_group(self, name: str) -> list[ReservedDevice]:
        """Devices of the group "trainer" or "critic", in rank order. Raises MachineLost as `replace_lost` does."""
        if name == "trainer":
            self.trainers = self.replace_lost(self.trainers)
            return self.trainers
        self._critics = self.replace_lost(self._critics)
        return self._critics

    def replace_lost(self, devices: Sequence[ReservedDevice]) -> list[ReservedDevice]:
        """Return `devices`, with free devices of another machine in place of those on a machine that has left the cluster, or leaves.

        Devices of one lost machine stay together. Raises MachineLost if no machine has enough free devices.
        """
        nodes = {node["NodeID"]: node for node in self._open_nodes()}
        lost = Counter(device.node_id for device in devices if device.node_id not in nodes)
        if lost:
            self._on_change()
        replacements = {node: iter(self._claim_elsewhere(list(nodes.values()), count)) for node, count in lost.items()}
        return [next(replacements[device.node_id]) if device.node_id in replacements else device for device in devices]

    def _claim_elsewhere(self, nodes: list[dict[str, Any]], count: int) -> list[ReservedDevice]:
        """Reserve `count` free devices of one of `nodes`."""
        if self._resource is None:
            return [_device(max(nodes, key=lambda node: node["Resources"].get("CPU", 0)))] * count
        free = available_resources_per_node()
        for node in nodes:
            if free.get(node["NodeID"], {}).get(self._resource, 0) >= count:
                try:
                    return self._reserve_bundles([[node] * count], f"{count} on {node['NodeManagerAddress']}")[0]
                except ValueError as error:
                    raise MachineLost(str(error)) from error
        raise MachineLost(
            f"a machine with {count} {self._resource} of this run has left the Ray cluster, and no other machine has as many free"
        )

    def claim(self, count: int) -> list[ReservedDevice]:
        """Reserve `count` free devices of one machine, for an additional engine. Raises MachineLost if no machine has as many."""
        if self.free(count) == 0:
            raise MachineLost(f"no machine of the Ray cluster has {count} free {self._resource}")
        self._on_change()
        return self._claim_elsewhere(self._open_nodes(), count)

    def free(self, count: int) -> int | None:
        """Return how many additional engines of `count` devices the free devices hold; None: any number, without devices."""
        if self._resource is None:
            return None
        free = available_resources_per_node()
        return sum(int(free.get(node["NodeID"], {}).get(self._resource, 0)) // count for node in self._open_nodes())

    def give_back(self, devices: Sequence[ReservedDevice]) -> None:
        """Release the devices of an engine that has left, for other engines and jobs."""
        self._on_change()
        groups = {device.group.id: device.group for device in devices if device.group is not None}
        for group in groups.values():
            self._reservations = [each for each in self._reservations if each.id != group.id]
            ray.util.remove_placement_group(group)

    def has_trainers(self, node_id: str) -> bool:
        """Return whether a node has devices of trainers or critics, also while none of these runs."""
        return any(device.node_id == node_id for device in [*self.trainers, *self._critics])

    def leave(self, node_id: str) -> None:
        """Start no further process on a node, which leaves the cluster."""
        self._leaving.add(node_id)
        self._on_change()

    def _open_nodes(self) -> list[dict[str, Any]]:
        return [node for node in living_nodes() if node["NodeID"] not in self._leaving]

    def next_engine(self, count: int) -> list[ReservedDevice]:
        """Claim the devices of the next engine, all on one machine."""
        assert self._engines, f"more engines than reserved: {self._demand}"
        claimed = self._engines.pop(0)
        assert self._resource is None or count == len(claimed), f"{count} devices; reserved: {self._demand}"
        return claimed

    def visible(self, devices: list[ReservedDevice]) -> dict[str, str]:
        """Return the environment in which a process sees only `devices`, numbered 0 .. n - 1."""
        if not self._variable:
            return {}
        # Without the first variable, Ray overwrites the second with the actor's single device.
        return {
            f"RAY_EXPERIMENTAL_NOSET_{self._variable}": "1",
            self._variable: ",".join(device.id for device in devices),
        }

    def options(self, device: ReservedDevice) -> dict[str, Any]:
        """Options of an actor on `device`."""
        if device.group is None:
            return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(device.node_id, soft=False)}
        strategy = PlacementGroupSchedulingStrategy(device.group, placement_group_bundle_index=device.bundle)
        return {**self._amount(SHARE), "scheduling_strategy": strategy}

    def release(self) -> None:
        """Release all reservations."""
        for group in self._reservations:
            ray.util.remove_placement_group(group)
        self._reservations, self.trainers, self._critics, self._engines = [], [], [], []

    def _amount(self, count: float) -> dict[str, Any]:
        if self._resource == "GPU":
            return {"num_cpus": 0, "num_gpus": count}
        return {"num_cpus": 0, "resources": {self._resource: count}}

    def _reserve(self, nodes: list[dict[str, Any]], plan: DeviceMap) -> dict[Slot, ReservedDevice]:
        """Reserve a bundle for each device of `plan`: one placement group, and one per engine if engines leave."""
        per_node = plan.per_machine(len(nodes))
        counts = ", ".join(f"{n} on {node['NodeManagerAddress']}" for node, n in zip(nodes, per_node, strict=True) if n)
        parts = [part for part in plan.parts(separate_engines=self._demand.engines_leave) if part]
        reserved = self._reserve_bundles([[nodes[node] for node, _ in part] for part in parts], counts)
        devices: dict[Slot, ReservedDevice] = {}
        for part, group in zip(parts, reserved, strict=True):
            for number, node in enumerate(nodes):
                slots = [slot for slot in part if slot[0] == number]
                of_node = sorted((device for device in group if device.node_id == node["NodeID"]), key=_number)
                devices |= dict(zip(slots, of_node, strict=True))
        return devices

    def _reserve_bundles(self, parts: list[list[dict[str, Any]]], counts: str) -> list[list[ReservedDevice]]:
        """Reserve a placement group for each part: a device of each of its nodes. counts: devices per node, for the error."""
        groups = []
        for owners in parts:
            selectors = [{"ray.io/node-id": node["NodeID"]} for node in owners]
            groups.append(self._create([{str(self._resource): 1}] * len(owners), selectors))
        self._reservations += groups
        try:
            deadline = time.monotonic() + _RESERVE_SECONDS
            if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups):
                raise ValueError(self._not_granted(counts))
            ids = iter(self._ids([(group, len(owners)) for group, owners in zip(groups, parts, strict=True)]))
        except (GetTimeoutError, ValueError) as error:
            for group in groups:
                self._reservations.remove(group)
                ray.util.remove_placement_group(group)
            raise ValueError(self._not_granted(counts)) from error
        return [
            [_device(node, group, bundle, next(ids)) for bundle, node in enumerate(owners)]
            for group, owners in zip(groups, parts, strict=True)
        ]

    def _not_granted(self, counts: str) -> str:
        return (
            f"Ray did not grant the {self._resource} that were free a moment ago within {_RESERVE_SECONDS:.0f} s "
            f"({counts}): another job has taken them, or a machine has left. `ray status` shows which."
        )

    def _ids(self, groups: Sequence[tuple[PlacementGroup, int]]) -> list[str]:
        """Device number of each bundle; Ray shows it only to a process that holds the whole bundle."""
        bundles = [(group, bundle) for group, count in groups for bundle in range(count)]
        if not self._variable:
            return [""] * len(bundles)
        probe = ray.remote(max_retries=0)(_device_ids)
        probes = [
            probe.options(
                **self._amount(1),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote(self._resource)
            for group, bundle in bundles
        ]
        return ray_get(probes, timeout=_RESERVE_SECONDS)


def rank_environments(devices: list[ReservedDevice], master_port: int) -> list[dict[str, str]]:
    """Environment of each rank as torchrun would set it; rank 0's machine hosts the rendezvous."""
    per_node = Counter(device.node_id for device in devices)
    local_ranks: Counter[str] = Counter()
    environments = []
    for rank, device in enumerate(devices):
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(devices)),
                "LOCAL_RANK": str(local_ranks[device.node_id]),
                "LOCAL_WORLD_SIZE": str(per_node[device.node_id]),
                "MASTER_ADDR": devices[0].node_ip,
                "MASTER_PORT": str(master_port),
            }
        )
        local_ranks[device.node_id] += 1
    return environments


class LivingNodes:
    """Answers whether machines are alive, with at most one question to Ray in a second while they are.

    Callers ask for each process that starts, several times a second, and Ray notices a loss only after some seconds.
    """

    def __init__(self) -> None:
        self._ids, self._asked = frozenset[str](), -math.inf

    def __call__(self, node_id: str) -> bool:
        """Return whether Ray lists the machine with this id as alive: a second ago at most, or now if the answer is no."""
        if node_id not in self._ids or time.monotonic() - self._asked >= _ASK_SECONDS:
            self._ids, self._asked = frozenset(node["NodeID"] for node in living_nodes()), time.monotonic()
        return node_id in self._ids


is_alive = LivingNodes()


def node_with(resource: str) -> str | None:
    """Return the id of the living node with a resource; None if there is none."""
    return next((node["NodeID"] for node in living_nodes() if resource in node["Resources"]), None)


def living_nodes() -> list[dict[str, Any]]:
    """Nodes of the cluster, in the order of their addresses."""
    return sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (ipaddress.ip_address(node["NodeManagerAddress"]), node["NodeID"]),
    )


def _device(
    node: dict[str, Any], group: PlacementGroup | None = None, bundle: int = 0, number: str = ""
) -> ReservedDevice:
    return ReservedDevice(node["NodeID"], node["NodeManagerAddress"], group, bundle, number)


def _number(device: ReservedDevice) -> tuple[int, str]:
    """Sort key: the device's number; other names (UUIDs) sort as text."""
    return (int(device.id) if device.id.isdigit() else -1, device.id)


def _device_ids(resource: str) -> str:
    (number,) = ray.get_runtime_context().get_accelerator_ids()[resource]
    return str(number)
