"""Evaluation of SFT and DPO: the trainers compute the loss on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megarl.algorithms.catalogue import LOSSES
from megarl.batching.packing import split_evenly
from megarl.batching.plan import held_out_weights, plan_held_out
from megarl.data.preferences import PreferenceDataset
from megarl.data.sft import SFTDataset
from megarl.recipe.schema import Recipe
from megarl.rollout.evaluate import EvaluationResult
from megarl.rollout.source_dataset import group_of
from megarl.trainer.group import ActorGroup
from megarl.types import Metrics, Shard


@dataclass
class HeldOut:
    """The held-out rows, and the trainers that compute their loss.

    Normalizers are counted over all rows, so the result does not depend on how the rows are split into pieces. A piece has
    at most `data.prompts_per_step` rows, like a step.
    """

    recipe: Recipe
    examples: SFTDataset | PreferenceDataset
    actor: ActorGroup
    rows: int = field(init=False)
    samples_per_row: int = field(init=False)
    loss_tokens: int = field(init=False)
    weights: np.ndarray = field(init=False)  # loss weight of each sample's tokens

    def __post_init__(self) -> None:
        limit = self.recipe.evaluation.limit
        self.rows = len(self.examples) if limit is None else min(limit, len(self.examples))
        tokens = [[sample.loss_tokens for sample in group_of(n, self.examples[n], 0).samples] for n in range(self.rows)]
        self.samples_per_row = len(tokens[0])
        self.loss_tokens = int(np.sum(tokens))
        self.weights = held_out_weights(np.ravel(tokens), self.recipe)

    def evaluate(self) -> EvaluationResult:
        """Compute the mean loss and its metrics, under `eval/`. The trained state does not change."""
        metrics: Metrics = {}
        for shards in self._pieces():
            self.actor.load_shards(shards)
            if LOSSES[self.recipe.algorithm.loss].needs_reference:
                self.actor.compute_reference_log_probs()
            for part in self.actor.compute_held_out_metrics():
                for name, value in (part or {}).items():
                    metrics[name] = metrics.get(name, 0.0) + value
        return EvaluationResult(metrics)

    def _pieces(self) -> Iterator[list[Shard]]:
        """Yield the shards of each piece, by data-parallel rank."""
        size, per_row = self.recipe.data.prompts_per_step, self.samples_per_row
        for run in split_evenly(self.rows, -(-self.rows // size)):
            yield plan_held_out(
                [group_of(number, self.examples[number], 0) for number in run],
                self.weights[run.start * per_row : run.stop * per_row],
                self.loss_tokens,
                self.recipe,
                self.actor.data_parallel,
                self.actor.micro_batches_multiple_of,
                self.actor.model_flops,
            )
