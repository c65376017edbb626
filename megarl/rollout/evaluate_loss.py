"""Evaluation of SFT and DPO: the loss on held-out rows, by the trainers, without a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.algorithms.catalogue import LOSSES
from megarl.batching.flops import ModelFlops
from megarl.batching.packing import split_evenly
from megarl.batching.plan import held_out_weights, plan_held_out
from megarl.cluster.base import WorkerGroup
from megarl.data.preferences import PreferenceDataset
from megarl.data.sft import SFTDataset
from megarl.recipe.schema import Recipe
from megarl.rollout.evaluate import EvaluationResult
from megarl.rollout.source_dataset import group_of
from megarl.types import Metrics, Shard


@dataclass
class HeldOut:
    """The held-out rows, and the trainers that compute their loss.

    What each row weighs is counted over all of them, so the result does not depend on the pieces in which they are
    computed: of `data.prompts_per_step` rows at most, which is what fits the trainers in a step.
    """

    recipe: Recipe
    examples: SFTDataset | PreferenceDataset
    trainers: WorkerGroup
    data_parallel_rank: Sequence[int]  # of each trainer
    data_parallel: int
    micro_batches_multiple_of: int
    model_flops: ModelFlops | None  # None: not counted for this model
    rows: int = field(init=False)
    samples_per_row: int = field(init=False)
    loss_tokens: int = field(init=False)
    weights: np.ndarray = field(init=False)  # of each sample's tokens

    def __post_init__(self) -> None:
        limit = self.recipe.evaluation.limit
        self.rows = len(self.examples) if limit is None else min(limit, len(self.examples))
        tokens = [[sample.loss_tokens for sample in group_of(n, self.examples[n], 0).samples] for n in range(self.rows)]
        self.samples_per_row = len(tokens[0])
        self.loss_tokens = int(np.sum(tokens))
        self.weights = held_out_weights(np.ravel(tokens), self.recipe)

    def evaluate(self) -> EvaluationResult:
        """The mean loss, and the metrics that it reports, under `eval/`. What is trained stays as it is."""
        metrics: Metrics = {}
        for shards in self._pieces():
            self.trainers.scatter("load_shard", [(shards[rank],) for rank in self.data_parallel_rank])
            if LOSSES[self.recipe.algorithm.loss].needs_reference:
                self.trainers.call("compute_reference_log_probs")
            for found in self.trainers.call("compute_held_out_metrics"):
                for name, value in (found or {}).items():
                    metrics[name] = metrics.get(name, 0.0) + value
        return EvaluationResult(metrics)

    def _pieces(self) -> Iterator[list[Shard]]:
        """Of each piece, every data-parallel rank's shard."""
        size, per_row = self.recipe.data.prompts_per_step, self.samples_per_row
        for run in split_evenly(self.rows, -(-self.rows // size)):
            yield plan_held_out(
                [group_of(number, self.examples[number], 0) for number in run],
                self.weights[run.start * per_row : run.stop * per_row],
                self.loss_tokens,
                self.recipe,
                self.data_parallel,
                self.micro_batches_multiple_of,
                self.model_flops,
            )
