"""The values of each token of a few samples, taken while the policy is updated: `observe.token_samples_per_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.recipe.schema import Recipe

if TYPE_CHECKING:
    from megarl.algorithms.inputs import LossInputs
    from megarl.megatron.batch import MicroBatch

TokenVectors = dict[int, dict[str, np.ndarray]]
"""Per-token vectors (float32 [L]) by name, by index of the sample in the batch."""


def recorded_samples(recipe: Recipe) -> int:
    """Return how many samples of the batch's first group are recorded: the first ones."""
    if recipe.train.source != "rollout":
        return 0
    observe = recipe.observe
    return min(observe.token_samples_per_step, observe.samples_per_step, recipe.rollout.samples_per_prompt)


class TokenRecorder:
    """Collects the vectors of the samples with batch index below `count`. Other samples cost nothing."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.vectors: TokenVectors = {}

    def observer(
        self, batches: Sequence[MicroBatch], members: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> Callable[[MicroBatch, LossInputs], None]:
        """Return what records the chosen samples of a mini batch, called with each micro batch.

        members: of each micro batch, the shard indices of its samples. numbers: index in the batch of each sample of the shard.
        """
        recorded = {
            id(batch): [numbers[member] for member in of_batch]
            for batch, of_batch in zip(batches, members, strict=True)
            if any(numbers[member] < self._count for member in of_batch)
        }

        def record(batch: MicroBatch, inputs: LossInputs) -> None:
            if id(batch) in recorded:
                self.add(inputs, recorded[id(batch)])

        return record

    def add(self, inputs: LossInputs, numbers: Sequence[int]) -> None:
        """Record the samples of a micro batch. numbers: index in the batch of each of its samples.

        ``old_log_probs`` are the trainer's before the sample's first update, ``log_probs`` and ``entropy`` those in its last.
        """
        latest = {"log_probs": inputs.log_probs, "entropy": inputs.entropy, "advantages": inputs.advantages}
        latest["reference_log_probs"] = inputs.reference_log_probs
        before = {"old_log_probs": inputs.old_log_probs if inputs.old_log_probs is not None else inputs.log_probs}
        ends = np.cumsum(inputs.lengths)
        for number, length, end in zip(numbers, inputs.lengths, ends, strict=True):
            if number >= self._count:
                continue
            columns = latest if number in self.vectors else {**before, **latest}
            self.vectors.setdefault(number, {}).update(
                {
                    name: values[end - length : end].detach().float().cpu().numpy().copy()
                    for name, values in columns.items()
                    if values is not None
                }
            )

    def take(self) -> TokenVectors:
        """Return the vectors and forget them."""
        vectors, self.vectors = self.vectors, {}
        return vectors
