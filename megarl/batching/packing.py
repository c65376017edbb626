"""Pack samples into micro batches and assign them to data-parallel ranks: pure functions over lengths.

Invariants, checked by property tests:
- every sample of a mini batch is in exactly one micro batch of one data-parallel rank;
- every rank has the same number of micro batches (collectives need that), and none is empty;
- a micro batch has at most `max_tokens` tokens, unless it holds a single longer sample, or a single longer bundle of samples
  that stay together (`expand`);
- the same input gives the same plan.

Goals, in order of priority, and their guarantees:
1. Full: `share` is at least 0.97 if some whole number of rounds (one micro batch on each rank) would be 0.97 to 0.99 full
   with the batch's tokens. All rounds are equally full, so a batch of 3.1 rounds takes 4 rounds at 0.78 each; a batch of
   50 or more rounds always has such a number.
2. Even: `imbalance` is at most 1.03, measured in costs (FLOPs, quadratic attention included). Then pipeline stages do
   not wait for each other, nor do ranks that communicate within a forward pass (expert parallel) or at its end.
Both hold for spread-out lengths (GSM8K-like, log-normal, Pareto, uniform: tests/batching/test_packing.py) with at least
8 samples per micro batch on average and no sample above half the cost of an average micro batch. Otherwise micro batches
are as even as swaps make them, which may be far from even: long samples cost more per token than short ones, and a full
micro batch has no room to compensate. A larger `max_tokens` helps.

Method: assign samples, longest first, to the cheapest micro batch with room for them (Graham's LPT rule, 1969), then swap
samples between large and small micro batches. If the samples do not fit or remain uneven, try again with more micro
batches, while goal 1 holds. If they still do not fit, best fit decreasing (Johnson, 1974) determines the number.
verl determines a number from the tokens, and splits the batch into that many nearly equal parts with the largest differencing
method (Karmarkar and Karp, 1982), which may exceed the limit. slime packs by first fit, within the limit; only its
`balance_by_flops` divides by differencing and may exceed it. benchmarks/packing.py compares the methods.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FULL = 0.97  # micro batches are added for better balance only down to this share
EVEN = 1.03  # imbalance at which no micro batches are added

_NEAR_ENOUGH = 1.01  # times the mean: bins below this load are not reduced further
_NO_SAMPLE = -1  # in place of a sample
_IDLE_ROUNDS = 4  # rounds of swaps that do not shrink the largest micro batch, before the search stops
_PAIRS = 500_000  # sample pairs per round of swaps

Bins = list[list[int]]


class Slot(NamedTuple):
    """One sample in a micro batch. A filler repeats a sample with weight 0 in a micro batch that would be empty, since every
    rank has the same number of micro batches, a multiple of `multiple_of`."""

    sample: int
    filler: bool = False


Plan = list[list[list[Slot]]]
"""For each rank, its micro batches in order of execution."""


def offsets(sizes: Sequence[int]) -> np.ndarray:
    """Return the bounds of adjacent runs: run i has the items from offsets[i] to offsets[i + 1] - 1. int64 [runs + 1]."""
    return np.cumsum([0, *sizes])


def expand(plan: Plan, sizes: Sequence[int]) -> Plan:
    """Expand a plan of bundles to a plan of samples. Bundle b is a run of `sizes[b]` adjacent samples, kept together."""
    firsts = offsets(sizes).tolist()

    def samples(bundle: Slot) -> list[Slot]:
        return [Slot(sample, bundle.filler) for sample in range(firsts[bundle.sample], firsts[bundle.sample + 1])]

    return [
        [[slot for bundle in micro_batch for slot in samples(bundle)] for micro_batch in micro_batches]
        for micro_batches in plan
    ]


def split_evenly(count: int, parts: int) -> list[range]:
    """Split `count` ordered items into at most `parts` runs. No run is empty, and their sizes differ by at most one."""
    parts = min(parts, count)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def share(plan: Plan, lengths: Sequence[int] | np.ndarray, max_tokens: int) -> float:
    """Return the fraction of the micro batches' token capacity that holds real tokens.

    Micro batches are not padded to `max_tokens`: a low share means more, smaller forward passes than necessary. A micro
    batch above the limit counts as the limit, a filler as 0.
    """
    tokens = [
        min(max_tokens, sum(int(lengths[slot.sample]) for slot in micro_batch if not slot.filler))
        for micro_batches in plan
        for micro_batch in micro_batches
    ]
    return sum(tokens) / (max_tokens * len(tokens))


def imbalance(plan: Plan, costs: Sequence[float] | np.ndarray) -> float:
    """Return the largest micro-batch cost over the mean micro-batch cost, of all ranks; at least 1."""
    loads = [sum(costs[slot.sample] for slot in micro_batch) for rank in plan for micro_batch in rank]
    return float(max(loads) / np.mean(loads))


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    max_tokens: int,
    multiple_of: int = 1,
    costs: Sequence[float] | np.ndarray | None = None,
) -> Plan:
    """Pack one mini batch with lengths [B] (tokens, positive): return the micro batches of each of `ranks`.

    `costs` [B]: compute cost of each sample in any unit (`ModelFlops.of`); None: the lengths. The number of micro
    batches of a rank is a multiple of `multiple_of` (pipeline stages under interleaving).
    """
    assert len(lengths) and ranks > 0 and max_tokens > 0 and multiple_of > 0, (
        len(lengths),
        ranks,
        max_tokens,
        multiple_of,
    )
    length = np.asarray(lengths, dtype=np.int64)
    cost = length.astype(np.float64) if costs is None else np.asarray(costs, dtype=np.float64)

    def rounded(count: float) -> int:
        return math.ceil(count / multiple_of) * multiple_of

    capacity = np.minimum(length, max_tokens).sum() / max_tokens / ranks  # micro batches per rank if all were full
    fewest = rounded(capacity)
    most = max(fewest, int(capacity / FULL) // multiple_of * multiple_of)
    best, least = None, math.inf
    for count in sorted({fewest, most}):
        bins = _assign_longest_first(length, cost, ranks * count, max_tokens)
        excess = math.inf if bins is None else _even_out(bins, length, cost, max_tokens)
        if excess < least:
            best, least = bins, excess
        if excess <= EVEN:
            break
    if best is None:
        tight = _fill(length, max_tokens)
        count = rounded(len(tight) / ranks)
        best = _divide(tight, ranks * count)
        _even_out(best, length, cost, max_tokens)
    return _deal(best, length, cost, ranks)


def _totals(bins: Bins, values: np.ndarray) -> np.ndarray:
    """Return the sum of the members' values, float64 [bins]."""
    members = np.fromiter(itertools.chain.from_iterable(bins), dtype=np.int64)
    owners = np.repeat(np.arange(len(bins)), [len(bin_members) for bin_members in bins])
    return np.bincount(owners, weights=values[members], minlength=len(bins))


def _longest_first(length: np.ndarray) -> list[tuple[int, int]]:
    """Return (sample, length) pairs, longest first."""
    order = np.argsort(-length, kind="stable")
    return list(zip(order.tolist(), length[order].tolist(), strict=True))


def _assign_longest_first(length: np.ndarray, cost: np.ndarray, count: int, max_tokens: int) -> Bins | None:
    """Assign longest first to the bin of least cost (LPT) with room for it. None if a sample does not fit."""
    costs = cost.tolist()
    bins: Bins = [[] for _ in range(count)]
    room = [max_tokens] * count
    least = [(0.0, index) for index in range(count)]  # (cost, bin)
    # Bins without room for the current sample, which may have room for shorter ones: (-room, bin, cost).
    waiting: list[tuple[int, int, float]] = []
    for sample, tokens in _longest_first(length):
        while waiting and -waiting[0][0] >= tokens:
            _, index, load = heapq.heappop(waiting)
            heapq.heappush(least, (load, index))
        while least and room[least[0][1]] < tokens and bins[least[0][1]]:
            load, index = heapq.heappop(least)
            heapq.heappush(waiting, (-room[index], index, load))
        if not least:
            return None
        load, index = least[0]
        bins[index].append(sample)
        room[index] -= tokens
        heapq.heapreplace(least, (load + costs[sample], index))
    return bins


def _fill(length: np.ndarray, max_tokens: int) -> Bins:
    """Assign longest first to the fullest bin with room for it (best fit): few but uneven bins."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    for sample, tokens in _longest_first(length):
        position = bisect.bisect_left(rooms, (tokens, -1))
        if position == len(rooms):
            room, index = max_tokens, len(bins)
            bins.append([])
        else:
            room, index = rooms.pop(position)
        bins[index].append(sample)
        if room > tokens:
            bisect.insort(rooms, (room - tokens, index))
    return bins


def _divide(bins: Bins, count: int) -> Bins:
    """Extend to `count` bins: each new bin takes the shortest sample of the bin with the most samples.

    A new bin is empty only if no bin has two samples left.
    """
    crowded = [(-len(members), index) for index, members in enumerate(bins)]
    heapq.heapify(crowded)
    for _ in range(count - len(bins)):
        index = crowded[0][1]
        bins.append([bins[index].pop()] if len(bins[index]) > 1 else [])
        heapq.heapreplace(crowded, (-len(bins[index]), index))
    return bins


class _LoadedBins:
    """Bins of samples with their loads (costs) and room (tokens), float64 [bins], which `exchange` updates.

    `length` and `cost` [B + 1] of the samples are 0 at the index `_NO_SAMPLE`.
    """

    def __init__(self, members: Bins, length: np.ndarray, cost: np.ndarray, max_tokens: int) -> None:
        self.members = members
        self.length, self.cost = np.append(length, 0), np.append(cost, 0.0)
        self.load = _totals(members, cost)
        self.room = max_tokens - _totals(members, length)

    def candidates(self, indices: np.ndarray, width: int, turn: int) -> np.ndarray:
        """Return `width` members of each bin, spread over all of them, and `_NO_SAMPLE` where a bin has fewer: [bins, width].

        `turn` selects which members of a crowded bin are returned.
        """
        rows = []
        for members in (self.members[index] for index in indices):
            stride = max(1, -(-len(members) // width))
            some = members[turn % stride :: stride]
            rows.append(some + [_NO_SAMPLE] * (width - len(some)))
        return np.array(rows)

    def exchange(self, source: int, target: int, leaving: int, entering: int) -> None:
        """Move `leaving` from bin `source` to `target`, and `entering`, unless it is `_NO_SAMPLE`, back."""
        self.members[source].remove(leaving)
        self.members[target].append(leaving)
        if entering != _NO_SAMPLE:
            self.members[target].remove(entering)
            self.members[source].append(entering)
        cost, tokens = self.cost[leaving] - self.cost[entering], self.length[leaving] - self.length[entering]
        self.load[source] -= cost
        self.load[target] += cost
        self.room[source] += tokens
        self.room[target] -= tokens


def _even_out(members: Bins, length: np.ndarray, cost: np.ndarray, max_tokens: int) -> float:
    """Swap samples between large and small bins until the largest stops shrinking. Updates `members`.

    Returns the largest load as a multiple of its lower bound: the mean, or the costliest sample if that is larger.
    """
    bins = _LoadedBins(members, length, cost, max_tokens)
    goal = max(bins.load.mean(), cost.max())
    largest, idle = bins.load.max(), 0
    while largest > _NEAR_ENOUGH * goal and idle < _IDLE_ROUNDS:
        order, half = np.argsort(bins.load, kind="stable"), len(members) // 2
        large = order[half:][::-1]
        large = large[bins.load[large] > _NEAR_ENOUGH * bins.load.mean()]
        small = np.roll(order[:half], -idle)[: len(large)]  # other partners after a round without improvement
        _swap(bins, large[: len(small)], small, turn=idle)
        idle = 0 if bins.load.max() < 0.999 * largest else idle + 1
        largest = bins.load.max()
    return float(largest / goal)


def _swap(bins: _LoadedBins, large: np.ndarray, small: np.ndarray, turn: int) -> None:
    """Bring the loads of each pair of bins large[p], small[p] closer: swap a sample for a cheaper one, or move a sample.

    `turn`: see `_LoadedBins.candidates`.
    """
    pairs = len(large)
    if not pairs:
        return
    width = int(np.clip(math.sqrt(_PAIRS / pairs), 4, 64))
    leaving = bins.candidates(large, width, turn)
    entering = np.column_stack([bins.candidates(small, width, turn), np.full(pairs, _NO_SAMPLE)])
    # All swaps of each pair, [pairs, width, width + 1]: tokens and cost that the large bin loses.
    tokens = bins.length[leaving][:, :, None] - bins.length[entering][:, None]
    cost = bins.cost[leaving][:, :, None] - bins.cost[entering][:, None]
    gap = (bins.load[large] - bins.load[small])[:, None, None]
    fits = (tokens <= bins.room[small][:, None, None]) & (-tokens <= bins.room[large][:, None, None])
    # A bin's only sample never moves, since its cost is at least the gap.
    fits &= (cost > 0.02 * gap) & (cost < 0.98 * gap)
    miss = np.where(fits, np.abs(cost - gap / 2), np.inf).reshape(pairs, -1)
    for pair, best in enumerate(miss.argmin(axis=1).tolist()):
        if miss[pair, best] < np.inf:
            i, j = divmod(best, width + 1)
            bins.exchange(int(large[pair]), int(small[pair]), int(leaving[pair, i]), int(entering[pair, j]))


def _deal(bins: Bins, length: np.ndarray, cost: np.ndarray, ranks: int) -> Plan:
    """Distribute bins over ranks in rounds of similar load: the largest of a round goes to the rank with the least load.

    A rank runs its smallest bins first and last, since pipeline stages wait for these while the pipeline fills and drains.
    """
    load = _totals(bins, cost)
    order = np.argsort(load, kind="stable")[::-1].tolist()
    filler = Slot(int(length.argmin()), filler=True)
    descending: Plan = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for start in range(0, len(bins), ranks):
        behind = sorted(range(ranks), key=lambda rank: (total[rank], rank))
        for rank, index in zip(behind, order[start : start + ranks], strict=True):
            descending[rank].append([Slot(sample) for sample in sorted(bins[index])] or [filler])
            total[rank] += load[index]
    return [micro_batches[::-1][::2] + micro_batches[::-1][1::2][::-1] for micro_batches in descending]
