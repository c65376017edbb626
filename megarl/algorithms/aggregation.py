"""Aggregation of per-token losses into a scalar (`token_mean`: DAPO). `batching/plan.py` applies the weights.

An aggregation returns the weight of each sample's loss tokens; the loss is the weighted sum over all loss tokens. Weights
derive from lengths counted over the whole mini batch before it is split, so the loss does not depend on micro batches,
packing or parallel layout. Loss tokens: those with `loss_mask` 1, which the loss counts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from megarl.registry import Registry


class Aggregation(Protocol):
    def __call__(self, loss_tokens: np.ndarray, max_response_length: int) -> np.ndarray: ...


AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


def _reciprocal(counts: ArrayLike) -> np.ndarray:
    """Return 1 / counts, and 0 where a count is 0 (a sample without loss tokens has no weight)."""
    values = np.asarray(counts, dtype=np.float64)
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)


@AGGREGATIONS.register("token_mean")
def token_mean(loss_tokens: np.ndarray, max_response_length: int) -> np.ndarray:
    """Give every token the same weight (DAPO, arXiv 2503.14476). loss_tokens [B] -> weights [B]."""
    return np.broadcast_to(_reciprocal(np.sum(loss_tokens)), np.shape(loss_tokens)).copy()


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(loss_tokens: np.ndarray, max_response_length: int) -> np.ndarray:
    """Give every sample the same weight, shared by its tokens (GRPO). Samples without loss tokens do not count."""
    samples = np.sum(np.asarray(loss_tokens) > 0)
    return _reciprocal(loss_tokens) * _reciprocal(samples)


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(loss_tokens: np.ndarray, max_response_length: int) -> np.ndarray:
    """Sum over each sample's tokens, then average over the samples with loss tokens."""
    samples = np.sum(np.asarray(loss_tokens) > 0)
    return np.where(np.asarray(loss_tokens) > 0, _reciprocal(samples), 0.0)


@AGGREGATIONS.register("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(loss_tokens: np.ndarray, max_response_length: int) -> np.ndarray:
    """Divide seq_mean_token_sum by the constant ``max_response_length`` (Dr.GRPO, arXiv 2503.20783)."""
    return seq_mean_token_sum(loss_tokens, max_response_length) / max_response_length
