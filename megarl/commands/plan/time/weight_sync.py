"""Seconds of new weights on their way to the engines, and of devices that change hands. Pure."""

from __future__ import annotations

from collections import Counter

from megarl.algorithms.advantages import uses_critic
from megarl.cluster.device_map import Demand
from megarl.commands.plan.count.types import Links
from megarl.commands.plan.count.workload import trainers_offload
from megarl.commands.plan.time.cost import Cost, host_network_seconds, host_seconds, offload_seconds, ring_seconds
from megarl.commands.plan.time.engines import Engines
from megarl.commands.plan.time.trainers import Trainers, state_bytes, weight_bytes
from megarl.platform.devices import Device
from megarl.recipe.schema import Recipe
from megarl.weight_sync.session import SHARED_MEMORY_TRANSPORTS


def exchange(trainers: Trainers, engines: Engines, planned: Links | None) -> Cost:
    """Weights to all engines.

    Planned: through the host's memory, out of the device that sends the most and into the one that receives the most; what
    goes to another node, through the hosts' own interfaces, of which each carries an equal part. From device to device: over the
    links between them and the devices' network, as much of it as of all bytes, and each side
    reads what it has in the host, for fingerprints, meanwhile. Over IPC: over the links between devices, also for what stays on
    a device, and through the hosts to other nodes. Else as mbridge exports: every trainer gathers every weight, rank 0
    hands them over through the host's memory, and gloo brings them from node to node through the hosts' own network
    interfaces (`export_host_seconds`); none of it at the same time.
    """
    device = trainers.device
    if planned is not None:
        if trainers.recipe.exchange.transport == "device":
            most = max(planned.sent, planned.received)
            outside = planned.between_nodes / planned.total if planned.total else 0.0
            links = most * outside / (device.network * device.link_share)
            links += most * (1 - outside) / (device.link * device.link_share)
            return Cost(links=links, host=max(0.0, host_seconds(device, most) - links))
        links = host_network_seconds(device, planned.between_nodes / _nodes(trainers))
        if trainers.recipe.exchange.transport == "ipc":
            outside = planned.between_nodes / planned.total if planned.total else 0.0
            most = max(planned.sent, planned.received)
            links += most * (1 - outside) / (device.link * device.link_share)
            return Cost(links=links, host=host_seconds(device, outside * (planned.sent + planned.received)))
        return Cost(links=links, host=host_seconds(device, planned.sent + planned.received))
    whole = float(trainers.shape.total * trainers.number)
    links = ring_seconds(device, whole, trainers.world)
    links += export_host_seconds(trainers.recipe, device, whole, *_engine_ranks(trainers))
    return Cost(links=links, host=2 * host_seconds(device, whole))


def export_host_seconds(recipe: Recipe, device: Device, size: float, first: int, count: int) -> float:
    """Seconds in which an export of `size` bytes reaches `count` engine ranks, which lie on devices from number `first` on.

    The first engine rank of each node beyond the first receives all of it and passes each bucket on to the next node, while
    the others of its node read its memory (megarl/weight_sync/full/relay.py): one model into each node and out of it, on all links at
    the same time. Every further node begins a bucket later. Without shared memory each rank receives its own, and the ranks
    of a node share their host's interface.
    """
    nodes = Counter((first + rank) // device.per_node for rank in range(count))
    del nodes[0]
    if not nodes:
        return 0.0
    each = 1 if recipe.exchange.transport in SHARED_MEMORY_TRANSPORTS else max(nodes.values())
    return host_network_seconds(device, each * size + (len(nodes) - 1) * (recipe.exchange.bucket_mb << 20))


def _engine_ranks(trainers: Trainers) -> tuple[int, int]:
    """The first engine rank's device, and how many there are: colocated, on the trainers' devices, else behind them."""
    demand = _demand(trainers.recipe)
    return (0 if demand.shared else demand.devices - demand.engine_devices), demand.engine_devices


def _nodes(trainers: Trainers) -> int:
    """Nodes with engines, whose interfaces share what goes between nodes: ranks pass on what others need too."""
    first, count = _engine_ranks(trainers)
    return len({(first + rank) // trainers.device.per_node for rank in range(count)})


def uncounted(trainers: Trainers, engines: Engines) -> Links:
    """Of planned copies before a plan is made: every engine rank receives what it holds, and trainers share the sending of
    one model. All of it goes over the network where any of it may."""
    total = engines.count * engines.tensor * engines.weights
    sent = engines.number * trainers.shape.total / trainers.world
    outside = total if _reaches_another_node(trainers) else 0.0
    return Links("planned", int(sent), int(engines.weights), int(total), int(outside))


def moved(trainers: Trainers) -> Cost:
    """Optimizer states and weights go to the host, or come back, where the recipe offloads."""
    if not trainers_offload(trainers.recipe):
        return Cost()
    return Cost(host=offload_seconds(trainers.device, weight_bytes(trainers) + state_bytes(trainers)))


def _reaches_another_node(trainers: Trainers) -> bool:
    """Whether engines lie beyond rank 0's node: colocated, on the first of the trainers' devices, else behind all of them."""
    demand = _demand(trainers.recipe)
    return (demand.engine_devices if demand.shared else demand.devices) > trainers.device.per_node


def _demand(recipe: Recipe) -> Demand:
    return Demand.of(recipe, trainers=True, engines=True, critic=uses_critic(recipe.algorithm))
