"""Seconds of a piece of work by what they are spent on, and how fast devices exchange bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megarl.platform.devices import Device

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
    """Seconds. Nothing is hidden behind something else: they add up."""

    compute: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    host: float = 0.0
    start: float = 0.0
    bubble: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(getattr(self, one.name) * times for one in fields(self)))

    @property
    def parts(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name)}

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What takes the most of it."""
        parts = self.parts
        return WORDS[max(parts, key=lambda name: parts[name])] if parts else "nothing"


def ring_seconds(device: Device, size: float, members: int, stride: int = 1) -> float:
    """An all-gather or reduce-scatter of `size` bytes (gathered) over `members` devices, `stride` apart.

    Each sends (n - 1) / n of it (Thakur et al. 2005, section 4.1). Where the group leaves the node, the network is what is
    slow: as many of its ports as the group has members in a node carry it.
    """
    if members <= 1:
        return 0.0
    rate = device.link
    if members * stride > device.per_node:
        rate = min(device.link, device.network * max(1, device.per_node // stride))
    return size * (members - 1) / members / (rate * device.link_share)


def all_to_all_seconds(device: Device, size: float, members: int) -> float:
    """Each of `members` neighbours sends `size` bytes, as much to each, itself included: within the node over its links
    and, at the same time, to other nodes over the network."""
    if members <= 1:
        return 0.0
    near = min(members, device.per_node)
    within = size * (near - 1) / members / device.link
    between = size * (members - near) / members / device.network
    return max(within, between) / device.link_share


def send_seconds(device: Device, size: float, distance: int) -> float:
    """`size` bytes to the device that is `distance` further."""
    return size / ((device.link if distance < device.per_node else device.network) * device.link_share)


def host_seconds(device: Device, size: float) -> float:
    """`size` bytes between a device and its host."""
    return size / (device.host_link * device.link_share)


def offload_seconds(device: Device, size: float) -> float:
    """`size` bytes of trainers' states or weights between a device and its host."""
    return size / device.offload_rate


def host_network_seconds(device: Device, size: float) -> float:
    """`size` bytes from one host to another over the interface that gloo uses."""
    return size / (device.host_network * device.link_share)
