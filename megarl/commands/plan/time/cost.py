"""Seconds of work by cause, and transfer times between devices and hosts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megarl.platform.device_table import Device

WORDS = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "links": "links between devices",
    "host": "link to the host",
    "start": "starting kernels",
    "bubble": "pipeline bubble",
}


@dataclass(frozen=True)
class Cost:
    """Seconds by cause. The parts add up: nothing overlaps."""

    compute: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    host: float = 0.0
    start: float = 0.0
    bubble: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(getattr(self, part.name) * times for part in fields(self)))

    @property
    def parts(self) -> dict[str, float]:
        return {part.name: getattr(self, part.name) for part in fields(self) if getattr(self, part.name)}

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The largest part."""
        parts = self.parts
        return WORDS[max(parts, key=lambda name: parts[name])] if parts else "nothing"


def ring_seconds(device: Device, size: float, members: int, stride: int = 1) -> float:
    """Return the seconds of an all-gather or reduce-scatter of `size` bytes (gathered) over `members`, `stride` apart.

    Each member sends (n - 1) / n of the bytes (Thakur et al. 2005, section 4.1) at the rate of the group's links. A group
    over several nodes also needs the network, with as many ports as the group has members per node.
    """
    if members <= 1:
        return 0.0
    rate = device.link_rate(range(0, min(members * stride, device.per_node), stride))
    if members * stride > device.per_node:
        rate = min(rate, device.network * max(1, device.per_node // stride))
    return size * (members - 1) / members / (rate * device.link_share)


def all_to_all_seconds(device: Device, size: float, members: int) -> float:
    """Return the seconds of an all-to-all in which each of `members` neighbours sends `size` bytes in total.

    Traffic within a full mesh, between the meshes of the node and between nodes runs at the same time.
    """
    if members <= 1:
        return 0.0
    near = min(members, device.per_node)
    joined = min(near, device.mesh or near)
    within = size * (joined - 1) / members / device.link_rate(range(joined))
    across = size * (near - joined) / members / device.host_link
    between = size * (members - near) / members / device.network
    return max(within, across, between) / device.link_share


def send_seconds(device: Device, size: float, distance: int) -> float:
    """Return the seconds of a transfer of `size` bytes to the device `distance` ranks away."""
    rate = device.link_rate((0, distance)) if distance < device.per_node else device.network
    return size / (rate * device.link_share)


def host_seconds(device: Device, size: float) -> float:
    """Return the seconds of a transfer of `size` bytes between a device and its host."""
    return size / (device.host_link * device.link_share)


def offload_seconds(device: Device, size: float) -> float:
    """Return the seconds of offloading `size` bytes of trainers' states or weights."""
    return size / device.offload_rate


def host_network_seconds(device: Device, size: float) -> float:
    """Return the seconds of a transfer of `size` bytes between hosts over the interface that gloo uses."""
    return size / (device.host_network * device.link_share)
