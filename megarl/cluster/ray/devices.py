"""Reserve the devices of a Ray cluster for trainers, critic and engines, in one placement group."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # no public API returns a node's free resources
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.cluster.device_map import Demand, DeviceMap, place, place_on_cpus
from megarl.cluster.failures import MachineLost
from megarl.cluster.ray.signals import ray_get

# Share of a device that a process reserves in Ray: less than a third, so that a time-shared device fits an actor trainer,
# a critic trainer and an engine. Ray does not enforce it.
SHARE = 0.3
_RESERVE_SECONDS = 60.0


@dataclass(frozen=True)
class ReservedDevice:
    """One device, reserved by one bundle of a placement group; without a group, a process that needs no device."""

    node_id: str
    node_ip: str
    group: PlacementGroup | None = None
    bundle: int = 0
    id: str = ""  # number of the device in the driver of its node


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

    def reserve(self) -> None:
        """Reserve the devices of the run. Raises ValueError if the cluster has too few."""
        nodes = _living_nodes()
        if self._resource is None:
            plan = place_on_cpus([int(node["Resources"].get("CPU", 0)) for node in nodes], self._demand)
            per_node = plan.per_machine(len(nodes))
            places = [[_device(node)] * count for node, count in zip(nodes, per_node, strict=True)]
        else:
            free = available_resources_per_node()
            machines = [
                (node["NodeManagerAddress"], int(free.get(node["NodeID"], {}).get(self._resource, 0))) for node in nodes
            ]
            plan = place(machines, self._demand, self._resource)
            places = self._reserve(nodes, plan)
        self.trainers = [places[node][number] for node, number in plan.trainers]
        self._critics = [places[node][number] for node, number in plan.critics]
        self._engines = [[places[node][number] for node, number in slots] for slots in [*plan.engines, *plan.fixed]]

    def of_group(self, name: str) -> list[ReservedDevice]:
        """Devices of the group "trainer" or "critic", in rank order. Raises MachineLost as `replace_lost` does."""
        if name == "trainer":
            self.trainers = self.replace_lost(self.trainers)
            return self.trainers
        self._critics = self.replace_lost(self._critics)
        return self._critics

    def replace_lost(self, devices: Sequence[ReservedDevice]) -> list[ReservedDevice]:
        """Return `devices`; those whose machine has left the cluster are replaced by free devices of another machine.

        Devices of one lost machine stay together. Raises MachineLost if no machine has enough free devices.
        """
        nodes = {node["NodeID"]: node for node in _living_nodes()}
        lost = Counter(device.node_id for device in devices if device.node_id not in nodes)
        others = {node: iter(self._claim_elsewhere(list(nodes.values()), count)) for node, count in lost.items()}
        return [next(others[device.node_id]) if device.node_id in others else device for device in devices]

    def _claim_elsewhere(self, nodes: list[dict[str, Any]], count: int) -> list[ReservedDevice]:
        """Reserve `count` free devices of one of `nodes`."""
        if self._resource is None:
            return [_device(max(nodes, key=lambda node: node["Resources"].get("CPU", 0)))] * count
        free = available_resources_per_node()
        for node in nodes:
            if free.get(node["NodeID"], {}).get(self._resource, 0) >= count:
                try:
                    return self._reserve_bundles([node] * count, f"{count} on {node['NodeManagerAddress']}")
                except ValueError as error:
                    raise MachineLost(f"a machine of this run has left the Ray cluster. {error}") from error
        raise MachineLost(
            f"a machine with {count} {self._resource} of this run has left the Ray cluster, and no other machine has as many free"
        )

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

    def _reserve(self, nodes: list[dict[str, Any]], plan: DeviceMap) -> list[list[ReservedDevice]]:
        """Reserve a bundle for each device of `plan`; returns the devices per node, sorted by number."""
        per_node = plan.per_machine(len(nodes))
        owners = [node for node, count in zip(nodes, per_node, strict=True) for _ in range(count)]
        counts = ", ".join(f"{n} on {node['NodeManagerAddress']}" for node, n in zip(nodes, per_node, strict=True) if n)
        devices = self._reserve_bundles(owners, counts)
        return [sorted((d for d in devices if d.node_id == node["NodeID"]), key=_number) for node in nodes]

    def _reserve_bundles(self, owners: list[dict[str, Any]], counts: str) -> list[ReservedDevice]:
        """Reserve a device of each node of `owners`. counts: the devices per node, for the error message."""
        selectors = [{"ray.io/node-id": node["NodeID"]} for node in owners]
        group = placement_group([{self._resource: 1}] * len(owners), bundle_label_selector=selectors)
        self._reservations.append(group)
        try:
            if not group.wait(_RESERVE_SECONDS):
                raise ValueError(self._not_granted(counts))
            ids = self._ids(group, len(owners))
        except (GetTimeoutError, ValueError) as error:
            self._reservations.remove(group)
            ray.util.remove_placement_group(group)
            raise ValueError(self._not_granted(counts)) from error
        return [_device(node, group, i, ids[i]) for i, node in enumerate(owners)]

    def _not_granted(self, counts: str) -> str:
        return (
            f"Ray did not grant the {self._resource} that were free a moment ago within {_RESERVE_SECONDS:.0f} s "
            f"({counts}): another job has taken them, or a machine has left. `ray status` shows which."
        )

    def _ids(self, group: PlacementGroup, count: int) -> list[str]:
        """Device number of each bundle; Ray shows it only to a process that holds the whole bundle."""
        if not self._variable:
            return [""] * count
        probe = ray.remote(max_retries=0)(_device_ids)
        probes = [
            probe.options(
                **self._amount(1),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote(self._resource)
            for bundle in range(count)
        ]
        return ray_get(probes, timeout=_RESERVE_SECONDS)


def is_alive(node_id: str) -> bool:
    """Return whether a machine is in the cluster, as far as Ray knows: it notices a loss after some seconds."""
    return any(node["NodeID"] == node_id for node in _living_nodes())


def _living_nodes() -> list[dict[str, Any]]:
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
