"""Micro batches whose sequences are padded to the longest of them (`megatron.packing: false`). Pure.

What a micro batch costs is then sequences x longest, so sequences of like length go together. Invariants, as in
schedule.py: each sample stands in one micro batch of one rank; all ranks have the same number of micro batches, none of
them empty; a micro batch computes at most `max_tokens` tokens, padding up to the longest sequence included, unless a
single longer sample fills it alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.batching.packing import Plan, Slot


def plan_padded_micro_batches(
    lengths: Sequence[int] | np.ndarray, ranks: int, max_tokens: int, multiple_of: int = 1
) -> Plan:
    """Lay out one mini batch: lengths [B] -> for each of `ranks` its micro batches, whose number is a multiple of
    `multiple_of`."""
    assert len(lengths) and ranks > 0 and multiple_of > 0
    order = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
    rectangles = []
    while order:
        count = max(1, max_tokens // int(lengths[order[0]]))
        rectangles.append(order[:count])
        order = order[count:]
    wanted = -(-len(rectangles) // (ranks * multiple_of)) * ranks * multiple_of
    while len(rectangles) < wanted:
        largest = max(rectangles, key=lambda members: (len(members) > 1, len(members) * lengths[members[0]]))
        if len(largest) == 1:
            break
        place, half = rectangles.index(largest), len(largest) // 2
        rectangles[place : place + 1] = [largest[:half], largest[half:]]
    shortest = min(range(len(lengths)), key=lambda sample: (lengths[sample], sample))
    slots = [[Slot(sample) for sample in sorted(members)] for members in rectangles]
    slots += [[Slot(shortest, filler=True)] for _ in range(wanted - len(rectangles))]
    return _deal(slots, lengths, ranks)


def _deal(micro_batches: list[list[Slot]], lengths: Sequence[int] | np.ndarray, ranks: int) -> Plan:
    """Each rank the same number, to and fro from the largest."""

    def size(slots: list[Slot]) -> int:
        return len(slots) * int(max(lengths[slot.sample] for slot in slots))

    plan: Plan = [[] for _ in range(ranks)]
    for position, slots in enumerate(sorted(micro_batches, key=lambda slots: -size(slots))):
        lap, place = divmod(position, ranks)
        plan[place if lap % 2 == 0 else ranks - 1 - place].append(slots)
    return plan
