"""Who is to send: chains of engine ranks that need the same, and the trainer rank that feeds each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def order_of(hosts: Sequence[str]) -> np.ndarray:
    """The place of each engine rank in the order in which buckets are passed on: hosts as they first come, then ranks."""
    first = {host: place for place, host in reversed(list(enumerate(hosts)))}
    order = np.argsort([first[host] for host in hosts], kind="stable")
    place = np.empty(len(hosts), np.int64)
    place[order] = np.arange(len(hosts))
    return place


def chains(
    ranks: Sequence[int],
    holders: Sequence[int],
    place: np.ndarray,
    engine_hosts: Sequence[str],
    by_host: dict[str, set[int]],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Engine `ranks` that need the same, as chains, each with the trainer ranks of which one is to feed it.

    `holders` have it; `by_host`: trainer ranks of each host. A host with a holder of its own begins a chain, since nothing has to
    travel to it; others continue the chain before them.
    """
    found: list[tuple[tuple[int, ...], list[int]]] = []
    local: dict[str, tuple[int, ...]] = {}
    for rank in sorted(ranks, key=lambda rank: place[rank]):
        host = engine_hosts[rank]
        if host not in local:
            near = by_host.get(host, set())
            local[host] = tuple(holder for holder in holders if holder in near)
            if local[host] or not found:
                found.append((local[host] or tuple(holders), []))
        found[-1][1].append(rank)
    return [(feeders, tuple(chain)) for feeders, chain in found]


def assign(candidates: Sequence[tuple[int, ...]], choice: np.ndarray, nbytes: np.ndarray, trainers: int) -> np.ndarray:
    """The trainer rank that sends each item, one of `candidates[choice[item]]`, such that all send about as much.

    Items that few can send are given out first. Those of one choice are cut into runs, as long as lets all of its ranks
    reach the same level: neighbours come from the same rank where they can.
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
        own = np.searchsorted(np.cumsum(room), middle, "right")
        sender[items] = ranks[own]
        loads[ranks] += np.bincount(own, nbytes[items], len(ranks)).astype(np.int64)
    return sender


def _room(loads: np.ndarray, more: int) -> np.ndarray:
    """How much each of `loads` has to grow, by `more` or a little beyond it in all, for the highest to be lowest."""
    rising = np.sort(loads)
    need = rising * np.arange(1, len(loads) + 1) - np.cumsum(rising)  # to lift the first k to the level of the k-th
    count = int(np.searchsorted(need, more, "right"))
    level = -(-(more + int(rising[:count].sum())) // count)
    return np.maximum(level - loads, 0)
