"""Small batches and settings for the tests of advantages and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.inputs import LossInputs, Outcomes
from megarl.recipe.algorithm import AlgorithmConfig, CorrectionConfig


def settings(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**values)


def correcting(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig(correction=CorrectionConfig(**values))


def outcomes(rewards: list[float], groups: list[int], tokens: list[int] | None = None) -> Outcomes:
    return Outcomes(np.array(rewards, dtype=np.float64), np.array(groups), np.array(tokens or [1] * len(rewards)))


def inputs(
    ratios: list[float], advantages: list[float], mask: list[float] | None = None, lengths: list[int] | None = None
) -> LossInputs:
    """Tokens with old probability 1 and current probability `ratios`, each with weight 1 / number of loss tokens."""
    count = len(ratios)
    loss_mask = torch.tensor(mask or [1.0] * count, dtype=torch.float64)
    tokens = loss_mask.sum().clamp(min=1)
    lengths = lengths or [count]
    return LossInputs(
        log_probs=torch.tensor(ratios, dtype=torch.float64).log().requires_grad_(),
        old_log_probs=torch.zeros(count, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=loss_mask,
        loss_weights=loss_mask / tokens,
        token_share=loss_mask / tokens,
        lengths=lengths,
    )


def random_inputs(seed: int, lengths: list[int], spread: float = 0.4) -> LossInputs:
    """Random sequences in float64: 0 to 2 excluded prompt tokens, some excluded response tokens, one advantage per token."""
    random = np.random.default_rng(seed)
    count = sum(lengths)
    mask = random.random(count) < 0.8
    for start in np.cumsum([0, *lengths[:-1]]):
        mask[start : start + random.integers(3)] = False
    old = -random.exponential(1.0, count) - 0.01
    vectors = {
        "log_probs": np.minimum(old + spread * random.normal(size=count), -1e-3),
        "old_log_probs": old,
        "rollout_log_probs": np.minimum(old + spread * random.normal(size=count), -1e-3),
        "reference_log_probs": np.minimum(old + spread * random.normal(size=count), -1e-3),
        "advantages": random.normal(size=count),
        "entropy": random.random(count),
        "loss_mask": mask,
        "loss_weights": mask * random.random(count),
        "token_share": mask / max(mask.sum(), 1),
    }
    tensors = {name: torch.tensor(np.asarray(vector, dtype=np.float64)) for name, vector in vectors.items()}
    tensors["log_probs"].requires_grad_()
    selected = torch.tensor(mask & (random.random(count) < 0.3))
    return LossInputs(**tensors, lengths=lengths, selected=selected)


def assert_gradient(actual: torch.Tensor, function: Callable[[np.ndarray], float], at: np.ndarray) -> None:
    """Assert that `actual` [T] is the gradient of `function` at log-probs `at` [T], by central differences."""
    step = 1e-6
    for token, shift in enumerate(step * np.eye(len(at))):
        slope = (function(at + shift) - function(at - shift)) / (2 * step)
        assert actual[token].item() == pytest.approx(slope, rel=1e-5, abs=1e-8), token


def sequences_of(batch: LossInputs) -> torch.Tensor:
    """Each token's sequence, counted from 0: [T]."""
    return torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))


def part_of(batch: LossInputs, sequences: list[int]) -> LossInputs:
    """The `sequences` of `batch`, in this order, with new leaf tensors."""
    keep = torch.cat([torch.nonzero(sequences_of(batch) == number).squeeze(1) for number in sequences])
    vectors = {
        field.name: getattr(batch, field.name).detach()[keep]
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor)
    }
    vectors["log_probs"].requires_grad_()
    return replace(batch, **vectors, lengths=[batch.lengths[number] for number in sequences])
