"""Assignment of the groups of a step to mini batches: `actor.mini_batch_order`. Pure functions.

It depends on the batch alone and not on the layout of the trainers, so the loss does not either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.batching.packing import offsets, split_evenly


def as_sampled(groups: int, mini_batches: int) -> list[np.ndarray]:
    """Return the indices of the groups of each mini batch: runs in admission order, equal in number up to one."""
    return [np.arange(run.start, run.stop) for run in split_evenly(groups, mini_batches)]


def balanced(costs: np.ndarray, sizes: Sequence[int], mini_batches: int, seed: int) -> list[np.ndarray]:
    """Return the indices of the groups of each mini batch: groups with similarly costly samples train together.

    `costs` [B]: of the samples; `sizes`: samples of each group. Ranks wait for the rank with the costliest sample of a mini batch.
    Where many samples are as costly, every rank has some of them, and none waits. `seed` permutes the mini batches, which would
    otherwise go from short to long in every step. Mini batches are as large as with `as_sampled`.
    """
    if mini_batches == 1:
        return as_sampled(len(sizes), 1)
    costliest = np.maximum.reduceat(costs, offsets(sizes)[:-1])
    order = np.argsort(costliest, kind="stable")
    parts = [np.sort(order[run.start : run.stop]) for run in split_evenly(len(sizes), mini_batches)]
    return [parts[index] for index in np.random.default_rng(seed).permutation(len(parts))]
