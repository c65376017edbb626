"""Seconds of new weights on their way to the engines, and of devices that change hands. Pure."""

from __future__ import annotations

from megarl.algorithms.advantages import uses_critic
from megarl.cluster.placement import Demand
from megarl.planner.cost import Cost, host_seconds, ring_seconds
from megarl.planner.estimate_engines import Engines
from megarl.planner.estimate_training import Trainers, state_bytes, weight_bytes
from megarl.planner.plan import Links
from megarl.planner.turns import leaves


def exchange(trainers: Trainers, engines: Engines, planned: Links | None) -> Cost:
    """Weights to all engines.

    Planned: through the host's memory, out of the device that sends the most and into the one that receives the most; and
    over the network, as much of it as of all bytes. From device to device: over the links between them, and each side
    reads what it has in the host, for fingerprints, meanwhile. Else as mbridge exports: every trainer gathers every weight, rank 0
    hands them over through the host's memory,
    and engines of other nodes have them over the network; none of it at the same time.
    """
    device = trainers.device
    if planned is not None:
        most = max(planned.sent, planned.received)
        outside = planned.between_nodes / planned.total if planned.total else 0.0
        links = most * outside / (device.network * device.link_share)
        if trainers.recipe.exchange.transport == "device":
            links += most * (1 - outside) / (device.link * device.link_share)
            return Cost(links=links, host=max(0.0, host_seconds(device, most) - links))
        return Cost(links=links, host=host_seconds(device, planned.sent + planned.received))
    whole = float(trainers.shape.total * trainers.number)
    links = ring_seconds(device, whole, trainers.world)
    if _reaches_another_node(trainers):
        links += whole / (device.network * device.link_share)
    return Cost(links=links, host=2 * host_seconds(device, whole))


def uncounted(trainers: Trainers, engines: Engines) -> Links:
    """Of planned copies before a plan is made: every engine rank receives what it holds, and trainers share the sending of
    one model. All of it goes over the network where any of it may."""
    total = engines.count * engines.tensor * engines.weights
    sent = engines.number * trainers.shape.total / trainers.world
    outside = total if _reaches_another_node(trainers) else 0.0
    return Links("planned", int(sent), int(engines.weights), int(total), int(outside))


def moved(trainers: Trainers) -> Cost:
    """Optimizer states and weights go to the host, or come back, where the recipe offloads."""
    if not leaves(trainers.recipe):
        return Cost()
    return Cost(host=host_seconds(trainers.device, weight_bytes(trainers) + state_bytes(trainers)))


def _reaches_another_node(trainers: Trainers) -> bool:
    """Whether engines lie beyond rank 0's node: colocated, on the first of the trainers' devices, else behind all of them."""
    recipe = trainers.recipe
    demand = Demand.of(recipe, trainers=True, engines=True, critic=uses_critic(recipe.algorithm))
    return (demand.engine_devices if demand.shared else demand.devices) > trainers.device.per_node
