"""Which device computes which sample, and in which forward pass: pure functions over lengths.

Invariants, held by property tests:
- every sample of a mini batch stands in exactly one micro batch of one data-parallel rank;
- every rank has the same number of micro batches (collectives need that), none of them empty;
- a micro batch holds at most `max_tokens` tokens, unless a single longer sample fills it alone;
- the same input gives the same plan.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One sample in a micro batch. A filler repeats a sample with weight 0 where a rank would have nothing to compute."""

    sample: int
    filler: bool = False


def split_evenly(count: int, parts: int) -> list[range]:
    """`count` things in order, cut into at most `parts` runs whose sizes differ by one at the most; no run is empty."""
    parts = min(parts, count)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def plan_micro_batches(
    lengths: Sequence[int], ranks: int, max_tokens: int, multiple_of: int = 1
) -> list[list[list[Slot]]]:
    """Pack one mini batch: lengths [B] -> for each of `ranks`, its micro batches, each a list of slots.

    The number of micro batches a rank is the smallest multiple of `multiple_of` (pipeline stages under
    interleaving) for which everything fits.
    """
    assert lengths and ranks > 0 and multiple_of > 0
    fewest = -(-sum(lengths) // (ranks * max_tokens))
    count = -(-max(fewest, 1) // multiple_of) * multiple_of
    bins = _pack(lengths, ranks * count, max_tokens)
    while bins is None:
        count += multiple_of
        bins = _pack(lengths, ranks * count, max_tokens)
    return _deal(bins, lengths, ranks)


def _pack(lengths: Sequence[int], bins: int, max_tokens: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest bin (LPT). None where a bin would exceed `max_tokens`."""
    heap = [(0, index) for index in range(bins)]
    packed: list[list[int]] = [[] for _ in range(bins)]
    for sample in sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample)):
        load, index = heapq.heappop(heap)
        if load and load + lengths[sample] > max_tokens:
            return None
        packed[index].append(sample)
        heapq.heappush(heap, (load + lengths[sample], index))
    return packed


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[Slot]]]:
    """Give each rank the same number of bins, to and fro from the fullest, so that ranks carry equal loads."""
    ordered = sorted(bins, key=lambda members: (-sum(lengths[sample] for sample in members), members))
    shortest = min(range(len(lengths)), key=lambda sample: (lengths[sample], sample))
    plan: list[list[list[Slot]]] = [[] for _ in range(ranks)]
    for position, members in enumerate(ordered):
        lap, place = divmod(position, ranks)
        rank = place if lap % 2 == 0 else ranks - 1 - place
        slots = [Slot(sample) for sample in sorted(members)]
        plan[rank].append(slots or [Slot(shortest, filler=True)])
    return plan
