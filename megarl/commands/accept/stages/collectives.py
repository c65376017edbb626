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
        pairs = slow_pairs(context, ranks, elements, hosts)
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


def slow_pairs(context: StageContext, ranks: Ranks, elements: int, hosts: Sequence[str]) -> str:
    """Measure pairs of ranks one at a time. Return a text that names the slow pairs, or "".

    Pairs within a host and pairs between hosts are compared separately, since a network is slower than a machine's links.
    """
    rates: dict[tuple[int, int], float] = {}
    for pair in pairs_of(hosts):
        context.doing(f"sending from rank {pair[0]} to rank {pair[1]}")
        seconds = next(answer for answer in ranks.call("pair", *pair, elements) if answer is not None)
        rates[pair] = 4 * elements / seconds
    context.figure("pairs of ranks, measured", f"{len(rates)} of {math.comb(len(hosts), 2)}")
    named: list[str] = []
    for kind, alike in (("within a host", True), ("between hosts", False)):
        chosen = {pair: rate for pair, rate in rates.items() if (hosts[pair[0]] == hosts[pair[1]]) is alike}
        if chosen:
            named += _pairs(context, kind, chosen)
    return ", ".join(named[:8])


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
    within = all(len({hosts[rank] for rank in timing.ranks}) == 1 for timing in timings.values())
    rate = device.link if within else device.network
    return SHARE * rate, f"{rate / 1e9:.3g} GB/s ({'link' if within else 'network'} of {device.name})"


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
