"""Stage 3: collectives in every group of the layout: values, speed, late ranks, slow pairs, memory of communicators."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

from megarl.commands.accept.collective_rank import Timing
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.ranks import COLLECTIVE_SECONDS, Ranks, all_ranks, local_ranks
from megarl.platform.device_table import Device, device_of
from megarl.recipe.trainers import MegatronConfig

RANK = "megarl.commands.accept.collective_rank:CollectiveRank"
SHARE = 0.6  # required rate of a collective, as a share of the link's rate in the table of devices
SLOW = 0.5  # a pair is slow below this share of the median pair's rate
LATE = 0.05  # limit of a rank's launch of a collective after the median rank, seconds
COMMUNICATOR = 1.0  # limit of one communicator's memory, GiB
_TINY_RATE, _TINY_LATE = 1e5, 0.5  # limits in bytes/s and seconds if processes share a few cores
PAIRS = 64  # largest number of measured pairs of each kind; `pairs_of` selects them


def run(context: StageContext) -> None:
    """Check the collectives of the recipe's layout if it has one trainer per device, else of a default layout."""
    megatron, why = layout(context)
    context.figure("layout", why)
    elements = (1 << 14) if context.tiny else (1 << 26)
    context.doing(f"starting {context.devices} ranks")
    if context.devices < 2:
        context.not_run("collectives", "one device")
        return
    with all_ranks(context, RANK, name="collectives") as ranks:
        places = ranks.call("describe")
        hosts = [place["host"] for place in places]
        context.doing("forming the groups")
        at_start = ranks.call("memory")  # before the first message, which creates the communicator of all ranks
        groups = ranks.call("lay_out", megatron, COLLECTIVE_SECONDS)
        names = sorted({name for rank_groups in groups for name in rank_groups}, key=lambda name: (name != "all", name))
        device = device_of(places[0]["device"])
        pairs = slow_pairs(context, ranks, elements, hosts, device)
        for name in names:
            before = at_start if name == "all" else ranks.call("memory")
            _group(context, ranks, name, elements, hosts, device, pairs, before)
        _two_on_a_device(context)


def layout(context: StageContext) -> tuple[MegatronConfig, str]:
    """Return a layout (the recipe's, or one with tensor, pipeline and expert parallel) and its description."""
    recipe, devices = context.recipe, context.devices
    if recipe is not None and recipe.cluster.trainers == devices:
        return recipe.megatron, "the recipe's"
    megatron = MegatronConfig()
    megatron.tensor_parallel = 2 if devices % 2 == 0 else 1
    megatron.pipeline_parallel = 2 if devices % 8 == 0 else 1
    left = devices // megatron.tensor_parallel // megatron.pipeline_parallel
    megatron.expert_parallel = devices // megatron.pipeline_parallel if left > 1 else 1
    needs = f"; the recipe has {recipe.cluster.trainers} trainers" if recipe is not None else ""
    text = (
        f"TP{megatron.tensor_parallel} PP{megatron.pipeline_parallel} EP{megatron.expert_parallel} on {devices} devices"
    )
    return megatron, text + needs


def pairs_of(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Select the pairs of ranks to measure. `hosts`: host of each rank.

    All pairs if there are at most PAIRS. Otherwise, neighbouring ranks of a host, and ranks with the same local index on
    neighbouring hosts: an evenly spaced selection of at most PAIRS of either kind.
    """
    every = list(combinations(range(len(hosts)), 2))
    if len(every) <= PAIRS:
        return every
    places: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        places.setdefault(host, []).append(rank)
    within = [pair for ranks in places.values() for pair in pairwise(ranks)]
    between = [
        tuple(sorted(pair))
        for host, following in pairwise(places.values())
        for pair in zip(host, following, strict=False)
    ]
    return [pair for kind in (within, between) for pair in kind[:: -(-len(kind) // PAIRS) or 1]]  # type: ignore[misc]


def slow_pairs(context: StageContext, ranks: Ranks, elements: int, hosts: Sequence[str], device: Device | None) -> str:
    """Measure pairs of ranks one at a time. Return a text that names the slow pairs, or "".

    Pairs of one kind (`_pair_kind`) are compared with each other, since a network is slower than a machine's links.
    """
    rates: dict[tuple[int, int], float] = {}
    for pair in pairs_of(hosts):
        context.doing(f"sending from rank {pair[0]} to rank {pair[1]}")
        seconds = next(answer for answer in ranks.call("pair", *pair, elements) if answer is not None)
        rates[pair] = 4 * elements / seconds
    context.figure("pairs of ranks, measured", f"{len(rates)} of {math.comb(len(hosts), 2)}")
    by_kind: dict[str, dict[tuple[int, int], float]] = {}
    for pair, rate in rates.items():
        by_kind.setdefault(_pair_kind(pair, hosts, device), {})[pair] = rate
    named = [text for kind in sorted(by_kind, reverse=True) for text in _pairs(context, kind, by_kind[kind])]
    return ", ".join(named[:8])


def _pair_kind(pair: tuple[int, int], hosts: Sequence[str], device: Device | None) -> str:
    """Return the kind of connection of two ranks: a network, the links of a host, or those within or between its meshes."""
    if hosts[pair[0]] != hosts[pair[1]]:
        return "between hosts"
    if device is None or not device.mesh:
        return "within a host"
    first, second = (device.mesh_of(index) for index in _local_indices(pair, hosts))
    return "within a mesh" if first == second else "between meshes of a host"


def _local_indices(ranks: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """Return the index of each of `ranks` among the ranks of its host. `hosts`: host of each rank."""
    return [hosts[:rank].count(hosts[rank]) for rank in ranks]


def _pairs(context: StageContext, kind: str, rates: dict[tuple[int, int], float]) -> list[str]:
    """Compare the slowest pair of one kind with the median. Return texts that name the slow pairs."""
    middle = statistics.median(rates.values())
    context.figure(f"pairs of ranks {kind}, median", middle / 1e9, unit="GB/s")
    if len(rates) < 2 or context.tiny:
        why = "processes share a few cores" if context.tiny else "only one pair"
        context.not_run(f"slowest pair of ranks {kind}", why)
        return []
    slowest = min(rates, key=lambda pair: rates[pair])
    named = [
        f"{first}-{second} ({rate / 1e9:.2g} GB/s)" for (first, second), rate in rates.items() if rate < SLOW * middle
    ]
    context.at_least(
        f"slowest pair of ranks {kind}, {slowest[0]}-{slowest[1]}", rates[slowest] / 1e9, limit=SLOW * middle / 1e9,
        unit="GB/s", cause=f"slow pairs: {', '.join(named[:8])}",
    )  # fmt: skip
    return named


def _group(
    context: StageContext, ranks: Ranks, name: str, elements: int, hosts: list[str], device: Device | None, pairs: str,
    before: list[float | None],
) -> None:  # fmt: skip
    """Check every collective of one group. `before`: free GiB of each rank's device before the group's communicator."""
    context.doing(f"collectives in the group {name}")
    answers: list[list[Timing]] = ranks.call("collectives", name, elements)
    after = ranks.call("memory")
    for number, first in enumerate(next(answer for answer in answers if answer)):
        timings = {rank: answer[number] for rank, answer in enumerate(answers) if answer}
        label = f"{name}: {first.collective}"
        wrong = [rank for rank, timing in timings.items() if not timing.right]
        context.equal(f"{label}, values", not wrong, True, cause=f"wrong values on ranks {wrong[:8]}")
        _late(context, label, timings)
        rate = min(timing.bytes / timing.seconds for timing in timings.values())
        limit, of = limit_of(context, timings, hosts, device)
        cause = f"{SHARE:.0%} of {of}" + (f"; slow pairs: {pairs}" if pairs else "")
        context.at_least(f"{label}, rate", rate / 1e9, limit=limit / 1e9, unit="GB/s", cause=cause)
    used = [free - left for free, left in zip(before, after, strict=True) if free is not None and left is not None]
    if used:
        cause = f"on rank {used.index(max(used))}: reduce the collective library's buffer per communicator with its variable"
        context.at_most(f"{name}: memory of the communicator", max(used), limit=COMMUNICATOR, unit="GiB", cause=cause)


def _late(context: StageContext, label: str, timings: dict[int, Timing]) -> None:
    """Compare the last rank's launch with the median of the other ranks, so that an early rank does not fail the check."""
    last = max(timings, key=lambda rank: timings[rank].launch)
    launches = [timing.launch for rank, timing in timings.items() if rank != last]
    behind = timings[last].launch - statistics.median(launches) if launches else 0.0
    cause = f"rank {last} enters {behind:.2g} s after the others"
    context.at_most(f"{label}, latest rank", behind, limit=_TINY_LATE if context.tiny else LATE, unit="s", cause=cause)


def limit_of(
    context: StageContext, timings: dict[int, Timing], hosts: list[str], device: Device | None
) -> tuple[float, str]:
    """Return the required rate in bytes/s and its source: links within a machine, or the network between machines."""
    if context.tiny or device is None:
        return _TINY_RATE, "a minimum, since the table of devices has no links for this one"
    groups = {timing.ranks for timing in timings.values()}
    if any(len({hosts[rank] for rank in group}) > 1 for group in groups):
        return SHARE * device.network, f"{device.network / 1e9:.3g} GB/s (network of {device.name})"
    if any(timing.collective == "p2p" for timing in timings.values()):  # from each rank to the next
        groups = {pair for group in groups for pair in pairwise((*group, group[0]))}
    members = min((_local_indices(group, hosts) for group in groups), key=device.link_rate)
    rate = device.link_rate(members)
    return SHARE * rate, f"{rate / 1e9:.3g} GB/s ({_connection(device, members)})"


def _connection(device: Device, members: Sequence[int]) -> str:
    """Name what limits `device.link_rate` of a group in a machine."""
    if not device.mesh:
        return f"link of {device.name}"
    if len({device.mesh_of(index) for index in members}) > 1:
        return (
            f"links and host_link of {device.name} for {len(members)} devices in several full meshes of {device.mesh}"
        )
    return f"link of {device.name} between {len(members)} devices of a full mesh of {device.mesh}"


def _two_on_a_device(context: StageContext) -> None:
    """Start a second set of processes on the same devices, like colocated engines: ports and memory must suffice."""
    from megarl.platform.kinds import kind_of

    if not kind_of(context.device).port_ranges:
        context.not_run("two processes on a device", "this kind of device uses no port ranges")
        return
    if context.settings.devices < 2:
        context.not_run("two processes on a device", "this node has one device, and a group needs two")
        return
    context.doing("two more ranks on devices that are in use")
    with local_ranks(context, RANK, 2, name="beside") as second:
        answers: Any = second.call("lay_out", MegatronConfig(tensor_parallel=2), COLLECTIVE_SECONDS)
        timings = second.call("collectives", "tensor", 1 << 20)
        right = all(timing.right for answer in timings for timing in answer)
        context.equal("two processes on a device", right and bool(answers), True, cause="wrong values")
