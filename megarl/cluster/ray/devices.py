"""Devices of a Ray cluster, reserved for trainers, critic and engines at once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray shows what is free on a node nowhere else
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.cluster.device_map import Demand, Plan, place, place_on_cpus
from megarl.cluster.ray.signals import ray_get

# What one process takes of a device, in Ray's books: less than a third, so that an actor's trainer, a critic's and
# an engine that take turns on it fit. Ray meters nothing by it.
SHARE = 0.3
_RESERVE_SECONDS = 60.0


@dataclass(frozen=True)
class Device:
    """One device, reserved by one bundle of a placement group; or a place on a machine, where none is needed."""

    node_id: str
    node_ip: str
    group: PlacementGroup | None = None
    bundle: int = 0
    id: str = ""  # the driver's number of it on its node


class RayDevices:
    """The devices of one run.

    resource: Ray's name of the device ("GPU", ...); None where processes need none: these go to machines
    by their number of CPUs, take nothing in Ray's books, and never wait for room.
    variable: the visible-devices variable; "" where there is none.
    """

    def __init__(self, resource: str | None, variable: str, demand: Demand) -> None:
        self._resource, self._variable, self._demand = resource, variable, demand
        self._group: PlacementGroup | None = None
        self.trainers: list[Device] = []  # in rank order
        self._critics: list[Device] = []  # in rank order
        self._engines: list[list[Device]] = []  # those that no engine has taken yet, those of fixed models last

    def reserve(self) -> None:
        """Take what the run needs. Raises ValueError where the cluster does not have it."""
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: (ipaddress.ip_address(node["NodeManagerAddress"]), node["NodeID"]),
        )
        if self._resource is None:
            plan = place_on_cpus([int(node["Resources"].get("CPU", 0)) for node in nodes], self._demand)
            taken = plan.per_machine(len(nodes))
            places = [[_device(node)] * count for node, count in zip(nodes, taken, strict=True)]
        else:
            free = available_resources_per_node()
            machines = [
                (node["NodeManagerAddress"], int(free.get(node["NodeID"], {}).get(self._resource, 0))) for node in nodes
            ]
            plan = place(machines, self._demand, self._resource)
            places = self._take(nodes, plan)
        self.trainers = [places[node][number] for node, number in plan.trainers]
        self._critics = [places[node][number] for node, number in plan.critics]
        self._engines = [[places[node][number] for node, number in slots] for slots in [*plan.engines, *plan.fixed]]

    def of_group(self, name: str) -> list[Device]:
        """The devices of "trainer" or "critic", in rank order."""
        return {"trainer": self.trainers, "critic": self._critics}[name]

    def next_engine(self, count: int) -> list[Device]:
        """The devices of the next engine, all of one machine."""
        assert self._engines, f"an engine more than was connected for: {self._demand}"
        claimed = self._engines.pop(0)
        assert self._resource is None or count == len(claimed), f"{count} devices; connected for {self._demand}"
        return claimed

    def visible(self, devices: list[Device]) -> dict[str, str]:
        """Environment under which a process sees just `devices`, as its numbers 0 .. n - 1."""
        if not self._variable:
            return {}
        # Without the first Ray would overwrite the second with the actor's own share.
        return {
            f"RAY_EXPERIMENTAL_NOSET_{self._variable}": "1",
            self._variable: ",".join(device.id for device in devices),
        }

    def options(self, device: Device) -> dict[str, Any]:
        """Options of an actor that lives on `device`."""
        if device.group is None:
            return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(device.node_id, soft=False)}
        strategy = PlacementGroupSchedulingStrategy(device.group, placement_group_bundle_index=device.bundle)
        return {**self._amount(SHARE), "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give the reservation back."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._group, self.trainers, self._critics, self._engines = None, [], [], []

    def _amount(self, count: float) -> dict[str, Any]:
        if self._resource == "GPU":
            return {"num_cpus": 0, "num_gpus": count}
        return {"num_cpus": 0, "resources": {self._resource: count}}

    def _take(self, nodes: list[dict[str, Any]], plan: Plan) -> list[list[Device]]:
        """Reserve a bundle for each device of `plan`; each node's devices, by their numbers."""
        taken = plan.per_machine(len(nodes))
        owners = [node for node, count in zip(nodes, taken, strict=True) for _ in range(count)]
        selectors = [{"ray.io/node-id": node["NodeID"]} for node in owners]
        self._group = placement_group([{self._resource: 1}] * len(owners), bundle_label_selector=selectors)
        if not self._group.wait(_RESERVE_SECONDS):
            self.release()
            raise ValueError(self._gone(nodes, taken))
        try:
            ids = self._ids(self._group, len(owners))
        except GetTimeoutError as error:
            self.release()
            raise ValueError(self._gone(nodes, taken)) from error
        devices = [_device(node, self._group, i, ids[i]) for i, node in enumerate(owners)]
        return [sorted((d for d in devices if d.node_id == node["NodeID"]), key=_number) for node in nodes]

    def _gone(self, nodes: list[dict[str, Any]], taken: list[int]) -> str:
        wanted = ", ".join(f"{n} on {node['NodeManagerAddress']}" for node, n in zip(nodes, taken, strict=True) if n)
        return (
            f"Ray has not given the {self._resource} that were free a moment ago within {_RESERVE_SECONDS:.0f} s "
            f"({wanted}): another job has taken them, or a machine has left. `ray status` shows which."
        )

    def _ids(self, group: PlacementGroup, count: int) -> list[str]:
        """The device number behind each bundle: only a process that holds the whole bundle is told."""
        if not self._variable:
            return [""] * count
        probe = ray.remote(max_retries=0)(_device_ids)
        asked = [
            probe.options(
                **self._amount(1),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote(self._resource)
            for bundle in range(count)
        ]
        return ray_get(asked, timeout=_RESERVE_SECONDS)


def _device(node: dict[str, Any], group: PlacementGroup | None = None, bundle: int = 0, number: str = "") -> Device:
    return Device(node["NodeID"], node["NodeManagerAddress"], group, bundle, number)


def _number(device: Device) -> tuple[int, str]:
    """By number; a driver may name devices otherwise (UUIDs)."""
    return (int(device.id) if device.id.isdigit() else -1, device.id)


def _device_ids(resource: str) -> str:
    (number,) = ray.get_runtime_context().get_accelerator_ids()[resource]
    return str(number)
