"""Micro batches padded to their longest sequence (`megatron.packing: false`). Pure functions.

A micro batch then costs sequences x longest, so sequences of similar length go together. Invariants, as in packing.py:
each sample is in one micro batch of one rank; all ranks have the same number of micro batches, none empty; a micro batch
computes at most `max_tokens` tokens, padding included, unless it holds a single longer sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.batching.packing import Plan, Slot


def plan_padded_micro_batches(
    lengths: Sequence[int] | np.ndarray, ranks: int, max_tokens: int, multiple_of: int = 1
) -> Plan:
    """Lay out one mini batch with lengths [B]: return the micro batches of each of `ranks`.

    Their number per rank is a multiple of `multiple_of`.
    """
    assert len(lengths) and ranks > 0 and max_tokens > 0 and multiple_of > 0, (
        len(lengths),
        ranks,
        max_tokens,
        multiple_of,
    )
    order = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
    rectangles = []
    while order:
        count = max(1, max_tokens // int(lengths[order[0]]))
        rectangles.append(order[:count])
        order = order[count:]
    needed = -(-len(rectangles) // (ranks * multiple_of)) * ranks * multiple_of
    while len(rectangles) < needed:
        largest = max(rectangles, key=lambda members: (len(members) > 1, len(members) * lengths[members[0]]))
        if len(largest) == 1:
            break
        position, half = rectangles.index(largest), len(largest) // 2
        rectangles[position : position + 1] = [largest[:half], largest[half:]]
    shortest = min(range(len(lengths)), key=lambda sample: (lengths[sample], sample))
    slots = [[Slot(sample) for sample in sorted(members)] for members in rectangles]
    slots += [[Slot(shortest, filler=True)] for _ in range(needed - len(rectangles))]
    return _deal(slots, lengths, ranks)


def _deal(micro_batches: list[list[Slot]], lengths: Sequence[int] | np.ndarray, ranks: int) -> Plan:
    """Assign micro batches to ranks from the largest on, in alternating rank order; every rank gets the same number."""

    def size(slots: list[Slot]) -> int:
        return len(slots) * int(max(lengths[slot.sample] for slot in slots))

    plan: Plan = [[] for _ in range(ranks)]
    for position, slots in enumerate(sorted(micro_batches, key=lambda slots: -size(slots))):
        lap, place = divmod(position, ranks)
        plan[place if lap % 2 == 0 else ranks - 1 - place].append(slots)
    return plan
