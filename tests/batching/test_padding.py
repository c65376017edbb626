"""Invariants of the plan of padded micro batches."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.batching.padding import plan_padded_micro_batches


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_is_computed_once_within_the_limit(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 200, random.integers(1, 60)).tolist()
    ranks, multiple, limit = (int(random.integers(1, top)) for top in (6, 4, 600))
    plan = plan_padded_micro_batches(lengths, ranks, limit, multiple)
    slots = [slot for rank in plan for micro_batch in rank for slot in micro_batch]
    assert sorted(slot.sample for slot in slots if not slot.filler) == list(range(len(lengths)))
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple == 0
    for micro_batch in (micro_batch for rank in plan for micro_batch in rank):
        assert micro_batch
        padded = len(micro_batch) * max(lengths[slot.sample] for slot in micro_batch)
        assert padded <= limit or len(micro_batch) == 1
    assert plan == plan_padded_micro_batches(lengths, ranks, limit, multiple)


def test_similar_lengths_share_a_micro_batch() -> None:
    plan = plan_padded_micro_batches([10, 90, 11, 88, 9, 92], ranks=1, max_tokens=276)
    assert [sorted(slot.sample for slot in micro_batch) for micro_batch in plan[0]] == [[1, 3, 5], [0, 2, 4]]
