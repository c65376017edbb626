"""Seconds of weight sync to the engines, and of moving trainers between device and host. Pure."""

from __future__ import annotations

from collections import Counter

from megarl.algorithms.advantages import uses_critic
from megarl.cluster.device_map import Demand
from megarl.commands.plan.count.types import Links
from megarl.commands.plan.count.workload import trainers_offload
from megarl.commands.plan.time.cost import (
    Cost,
    host_network_seconds,
    host_seconds,
    offload_seconds,
    ring_seconds,
    send_seconds,
)
from megarl.commands.plan.time.engines import Engines
from megarl.commands.plan.time.trainers import Trainers, state_bytes, weight_bytes
from megarl.platform.device_table import Device
from megarl.recipe.schema import Recipe, WeightSyncConfig
from megarl.weight_sync.session import SHARED_MEMORY_TRANSPORTS


def weight_sync_cost(trainers: Trainers, engines: Engines, sharded: Links | None) -> Cost:
    """Return the cost of sending the weights to all engines.

    Sharded (`sharded`): through host memory, limited by the device that sends most and the one that receives most; bytes
    between nodes use the hosts' interfaces evenly. Transport `device`: over the links between devices and the devices'
    network, while both sides read their host copies for fingerprints. Transport `ipc`: over the links between devices, also
    within a device, and through the hosts to other nodes. A rank copies one bucket at a time, over one link of a full mesh.

    Full (`sharded` is None), as mbridge exports: every trainer gathers every weight, rank 0 copies them to host memory, and
    gloo carries them from node to node over the hosts' interfaces (`export_host_seconds`); nothing overlaps.
    """
    device = trainers.device
    if sharded is not None:
        most = max(sharded.sent, sharded.received)
        outside = sharded.between_nodes / sharded.total if sharded.total else 0.0
        within = send_seconds(device, most * (1 - outside), distance=1)
        if trainers.recipe.weight_sync.transport == "device":
            links = most * outside / (device.network * device.link_share) + within
            return Cost(links=links, host=max(0.0, host_seconds(device, most) - links))
        links = host_network_seconds(device, sharded.between_nodes / _nodes(trainers))
        copied = sharded.sent + sharded.received
        if trainers.recipe.weight_sync.transport == "ipc":
            return Cost(links=links + within, host=host_seconds(device, outside * copied))
        return Cost(links=links, host=host_seconds(device, copied))
    whole = float(trainers.shape.total * trainers.number)
    links = ring_seconds(device, whole, trainers.world)
    demand = _demand(trainers.recipe)
    links += export_host_seconds(trainers.recipe.weight_sync, device, whole, demand.first_engine, demand.engine_devices)
    return Cost(links=links, host=2 * host_seconds(device, whole))


def export_host_seconds(weight_sync: WeightSyncConfig, device: Device, size: float, first: int, count: int) -> float:
    """Return the seconds in which an export of `size` bytes reaches `count` engine ranks, on devices from `first` on.

    The first engine rank of each further node receives all bytes and relays each bucket to the next node; the others of its
    node read its memory (megarl/weight_sync/relay.py). So each node receives and sends one model, on all links at the
    same time, and each further node starts a bucket later. Without shared memory each rank receives its own copy, and the
    ranks of a node share their host's interface.
    """
    nodes = Counter((first + rank) // device.per_node for rank in range(count))
    del nodes[0]
    if not nodes:
        return 0.0
    each = 1 if weight_sync.transport in SHARED_MEMORY_TRANSPORTS else max(nodes.values())
    return host_network_seconds(device, each * size + (len(nodes) - 1) * (weight_sync.bucket_mb << 20))


def _nodes(trainers: Trainers) -> int:
    """Return the number of nodes with engines; their interfaces share the bytes between nodes, since ranks relay."""
    demand = _demand(trainers.recipe)
    return len({(demand.first_engine + rank) // trainers.device.per_node for rank in range(demand.engine_devices)})


def uncounted(trainers: Trainers, engines: Engines) -> Links:
    """Return the bytes of sharded copies before a plan exists: every engine rank receives its weights, and trainers share
    the sending of one model. All of it counts as network traffic if any of it may be."""
    total = engines.count * engines.tensor * engines.weights
    sent = engines.number * trainers.shape.total / trainers.world
    outside = total if _reaches_another_node(trainers) else 0.0
    return Links("sharded", int(sent), int(engines.weights), int(total), int(outside))


def moved(trainers: Trainers) -> Cost:
    """Return the cost of offloading optimizer states and weights, or of loading them. 0 if the recipe does not offload."""
    if not trainers_offload(trainers.recipe):
        return Cost()
    return Cost(host=offload_seconds(trainers.device, weight_bytes(trainers) + state_bytes(trainers)))


def _reaches_another_node(trainers: Trainers) -> bool:
    """Return True if engines are on another node than rank 0."""
    demand = _demand(trainers.recipe)
    return demand.first_engine + demand.engine_devices > trainers.device.per_node


def _demand(recipe: Recipe) -> Demand:
    return Demand.of(recipe, trainers=True, engines=True, critic=uses_critic(recipe.algorithm))
