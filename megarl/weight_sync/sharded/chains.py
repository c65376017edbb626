"""Choose chains of engine ranks that need the same slices, and the trainer rank that sends each slice (`assign`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def chain_order(hosts: Sequence[str]) -> np.ndarray:
    """Return each engine rank's position in the order that buckets are passed on: by host's first rank, then by rank."""
    first = {host: position for position, host in reversed(list(enumerate(hosts)))}
    order = np.argsort([first[host] for host in hosts], kind="stable")
    position = np.empty(len(hosts), np.int64)
    position[order] = np.arange(len(hosts))
    return position


def chains(
    ranks: Sequence[int],
    holders: Sequence[int],
    position: np.ndarray,
    engine_hosts: Sequence[str],
    by_host: dict[str, set[int]],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split engine `ranks` that need the same slices into chains. Returns (candidate trainer ranks, chain) pairs.

    `holders`: trainer ranks that hold the slices. `by_host`: trainer ranks of each host. A host with a holder starts a
    chain, since its trainer can send over shared memory; the ranks of other hosts continue the previous chain. If the first
    host has no holder, it starts one more chain, which any holder may send.
    """
    result: list[tuple[tuple[int, ...], list[int]]] = []
    local_holders: dict[str, tuple[int, ...]] = {}
    for rank in sorted(ranks, key=lambda rank: position[rank]):
        host = engine_hosts[rank]
        if host not in local_holders:
            trainers = by_host.get(host, set())
            local_holders[host] = tuple(holder for holder in holders if holder in trainers)
            if local_holders[host] or not result:
                result.append((local_holders[host] or tuple(holders), []))
        result[-1][1].append(rank)
    return [(candidates, tuple(chain)) for candidates, chain in result]


def assign(candidates: Sequence[tuple[int, ...]], choice: np.ndarray, nbytes: np.ndarray, trainers: int) -> np.ndarray:
    """Assign each item a sender, one of `candidates[choice[item]]`, so that all trainers send about equally many bytes.

    Items with the fewest candidates come first. The items of one choice are cut into runs that raise all its candidates to
    the same load: neighbouring items share a sender where possible.
    """
    loads = np.zeros(trainers, np.int64)
    sender = np.empty(len(choice), np.int64)
    order = np.argsort(choice, kind="stable")
    starts = np.searchsorted(choice[order], np.arange(len(candidates) + 1))
    for number in sorted(range(len(candidates)), key=lambda number: (len(candidates[number]), candidates[number])):
        items = order[starts[number] : starts[number + 1]]
        ranks = np.array(candidates[number], np.int64)
        room = _room(loads[ranks], int(nbytes[items].sum()))
        middle = np.cumsum(nbytes[items]) - nbytes[items] // 2 - 1
        index = np.searchsorted(np.cumsum(room), middle, "right")
        sender[items] = ranks[index]
        loads[ranks] += np.bincount(index, nbytes[items], len(ranks)).astype(np.int64)
    return sender


def _room(loads: np.ndarray, more: int) -> np.ndarray:
    """Distribute `more` over `loads` so that the highest load is lowest. Returns each share; rounding up may exceed `more`."""
    rising = np.sort(loads)
    required = rising * np.arange(1, len(loads) + 1) - np.cumsum(rising)  # raises the first k loads to the k-th
    count = int(np.searchsorted(required, more, "right"))
    level = -(-(more + int(rising[:count].sum())) // count)
    return np.maximum(level - loads, 0)
