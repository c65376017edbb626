"""Advantages that compare tokens of a group at the same position: the group's samples may be on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.correction import corrections, corrects
from megarl.algorithms.inputs import TokenOutcomes
from megarl.algorithms.optimal_baseline import at_tokens, sums_by_position

if TYPE_CHECKING:  # these modules import Megatron, which the platform must prepare
    from torch import Tensor

    from megarl.megatron.batch import MicroBatch
    from megarl.megatron.trainer import PolicyTrainer
    from megarl.recipe.algorithm import AlgorithmConfig


def advantages_by_position(
    trainer: PolicyTrainer,
    settings: AlgorithmConfig,
    batches: Sequence[MicroBatch],
    outcomes: Sequence[TokenOutcomes],
    squares: Sequence[Tensor],
    group_lengths: list[int],
) -> list[np.ndarray]:
    """Return the advantages of each micro batch [T]. Collective over data-parallel ranks.

    batches: with old log-probs. outcomes: of each micro batch, with `groups`. squares: sums of squared probabilities [T] of
    each. group_lengths: `optimal_baseline.group_lengths` of the batch.
    """
    estimator = ADVANTAGES[settings.advantage].of_positions
    assert estimator is not None
    assert len(squares) == len(batches), "the pass for old log-probs computes the squared probabilities"
    full = [
        replace(
            part,
            log_probs=batch.vectors["old_log_probs"].double().cpu().numpy(),
            squares=sum_of_squares.double().cpu().numpy(),
            weights=_correction_weights(trainer, settings, batch),
        )
        for part, sum_of_squares, batch in zip(outcomes, squares, batches, strict=True)
    ]
    local = sums_by_position(((part, estimator.terms(part)) for part in full), group_lengths)
    sums = trainer.sum_over_data_parallel(local)
    return [estimator.function(part, at_tokens(part, sums, group_lengths), settings) for part in full]


def _correction_weights(trainer: PolicyTrainer, settings: AlgorithmConfig, batch: MicroBatch) -> np.ndarray | None:
    """Return each token's factor of the loss, float64 [T], without `correction.normalize`, which scales all samples of a
    group alike; None: all are 1."""
    if not corrects(settings.correction):
        return None
    old = batch.vectors["old_log_probs"]
    weights, _ = corrections(trainer.loss_inputs(batch, old), old, settings.correction, 1.0)
    return weights.double().cpu().numpy()
