"""Aggregation of per-token losses into a scalar (`token_mean`: DAPO). `batching/plan.py` applies the weights.

An aggregation returns the weight of each sample's loss tokens; the loss is the weighted sum over all loss tokens. Weights
derive from lengths counted over the whole mini batch before it is split, so the loss does not depend on micro batches,
packing or parallel layout. Loss tokens: those with `loss_mask` 1, which the loss counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from megarl.registry import Registry

Aggregation = Callable[..., np.ndarray]
"""Takes loss_tokens [B] and the divisor, and, if it has a third parameter, each sample's group number [B]. Returns the
weight of each sample's tokens [B]. The divisor is `algorithm.aggregation_divisor`, else `rollout.max_response_length`."""

AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


def _reciprocal(counts: ArrayLike) -> np.ndarray:
    """Return 1 / counts, and 0 where a count is 0 (a sample without loss tokens has no weight)."""
    values = np.asarray(counts, dtype=np.float64)
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)


def aggregate(function: Aggregation, loss_tokens: np.ndarray, divisor: float, groups: np.ndarray) -> np.ndarray:
    """Return the weight of each sample's loss tokens [B] by a registered function."""
    takes_groups = len(inspect.signature(function).parameters) > 2
    return function(loss_tokens, divisor, groups) if takes_groups else function(loss_tokens, divisor)


@AGGREGATIONS.register("token_mean")
def token_mean(loss_tokens: np.ndarray, divisor: float) -> np.ndarray:
    """Give every token the same weight (DAPO, arXiv 2503.14476). loss_tokens [B] -> weights [B]."""
    return np.broadcast_to(_reciprocal(np.sum(loss_tokens)), np.shape(loss_tokens)).copy()


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(loss_tokens: np.ndarray, divisor: float) -> np.ndarray:
    """Give every sample the same weight, shared by its tokens (GRPO). Samples without loss tokens do not count."""
    samples = np.sum(np.asarray(loss_tokens) > 0)
    return _reciprocal(loss_tokens) * _reciprocal(samples)


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(loss_tokens: np.ndarray, divisor: float) -> np.ndarray:
    """Sum over each sample's tokens, then average over the samples with loss tokens."""
    samples = np.sum(np.asarray(loss_tokens) > 0)
    return np.where(np.asarray(loss_tokens) > 0, _reciprocal(samples), 0.0)


@AGGREGATIONS.register("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(loss_tokens: np.ndarray, divisor: float) -> np.ndarray:
    """Divide seq_mean_token_sum by a constant: `aggregation_divisor`, or the maximum response length (Dr.GRPO, arXiv
    2503.20783)."""
    return seq_mean_token_sum(loss_tokens, divisor) / divisor


@AGGREGATIONS.register("token_sum")
def token_sum(loss_tokens: np.ndarray, divisor: float) -> np.ndarray:
    """Sum over all tokens of the mini batch, divided by a constant: `aggregation_divisor`, or the maximum response length."""
    return np.where(np.asarray(loss_tokens) > 0, 1.0 / divisor, 0.0)


@AGGREGATIONS.register("prompt_mean")
def prompt_mean(loss_tokens: np.ndarray, divisor: float, groups: np.ndarray) -> np.ndarray:
    """Give every prompt the same weight, shared by all tokens of its samples. Prompts without loss tokens do not count."""
    _, group = np.unique(groups, return_inverse=True)
    tokens = np.bincount(group, weights=loss_tokens)
    return np.where(np.asarray(loss_tokens) > 0, _reciprocal(tokens)[group] * _reciprocal(np.sum(tokens > 0)), 0.0)
