"""Devices of a Ray cluster, in the order in which ranks and engines take them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# What one process takes of a device, in Ray's books: less than half, so that a trainer and an engine
# that take turns on it fit. Ray meters nothing by it.
SHARE = 0.4
_RESERVE_SECONDS = 60.0


@dataclass(frozen=True)
class Device:
    """One device, reserved by one bundle of a placement group."""

    group: PlacementGroup
    bundle: int
    node_id: str
    node_ip: str
    id: str  # the driver's number of it on its node; "" on a CPU


class RayDevices:
    """Hands out devices; reserves more when it runs out.

    resource: Ray's name of the device ("GPU", "NPU"); None where processes need none: each then counts as one
    of Ray's CPUs.
    variable: the visible-devices variable; "" where there is none.
    shared: True where trainers and engines take turns on the same devices: each role then starts
    from the first one.
    """

    def __init__(self, resource: str | None, variable: str, *, shared: bool) -> None:
        self._resource, self._variable, self._shared = resource or "CPU", variable, shared
        self._devices: list[Device] = []
        self._taken: dict[str, int] = {}

    def claim(self, role: str, count: int, *, one_node: bool) -> list[Device]:
        """The next `count` devices for `role`, ordered by node.

        Raises ValueError where the cluster has no more, or, with `one_node`, where they lie on two.
        """
        cursor = role if self._shared else "any"
        first = self._taken.get(cursor, 0)
        missing = first + count - len(self._devices)
        if missing > 0:
            self._devices += self._reserve(missing, role, one_node=one_node and missing == count)
        self._taken[cursor] = first + count
        claimed = self._devices[first : first + count]
        nodes = sorted({device.node_ip for device in claimed})
        if one_node and len(nodes) > 1:
            raise ValueError(
                f"{role} takes {count} devices that must lie in one machine, and they fall on {', '.join(nodes)}: "
                "choose rollout.tensor_parallel so that it divides the devices of each machine."
            )
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
        strategy = PlacementGroupSchedulingStrategy(device.group, placement_group_bundle_index=device.bundle)
        return {**self._amount(SHARE), "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give every reservation back."""
        for group in {device.group.id: device.group for device in self._devices}.values():
            ray.util.remove_placement_group(group)
        self._devices, self._taken = [], {}

    def _amount(self, count: float) -> dict[str, Any]:
        if self._resource == "CPU":
            return {"num_cpus": count}
        if self._resource == "GPU":
            return {"num_cpus": 0, "num_gpus": count}
        return {"num_cpus": 0, "resources": {self._resource: count}}

    def _reserve(self, count: int, role: str, *, one_node: bool) -> list[Device]:
        free = int(ray.available_resources().get(self._resource, 0))
        total = int(ray.cluster_resources().get(self._resource, 0))
        if free < count:
            raise ValueError(
                f"{role} needs {count} more of {self._resource}; the Ray cluster has {total}, {free} of them free. "
                "Lower cluster.trainers, rollout.engines or rollout.tensor_parallel, or bring more machines."
            )
        strategy = "STRICT_PACK" if one_node else "PACK"
        group = placement_group([{self._resource: 1}] * count, strategy=strategy)
        if not group.wait(_RESERVE_SECONDS):
            ray.util.remove_placement_group(group)
            raise ValueError(
                f"{role}: no {'machine' if one_node else 'machines'} with {count} free {self._resource} "
                f"after {_RESERVE_SECONDS:.0f} s, though {free} were free in all."
            )
        return self._in_order(group, count)

    def _in_order(self, group: PlacementGroup, count: int) -> list[Device]:
        """The bundles of `group` by machine, then device number: neighbours in rank share a machine."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = placement_group_table(group)["bundles_to_node_id"]
        ids = self._ids(group, count)
        devices = [
            Device(group, bundle, nodes[bundle], addresses[nodes[bundle]], ids[bundle]) for bundle in range(count)
        ]
        return sorted(devices, key=lambda device: (ipaddress.ip_address(device.node_ip), int(device.id or 0)))

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
        return ray.get(asked)


def _device_ids(resource: str) -> str:
    (number,) = ray.get_runtime_context().get_accelerator_ids()[resource]
    return str(number)
