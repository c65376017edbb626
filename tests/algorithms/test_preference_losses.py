"""DPO against numbers worked by hand, a slow reference, and properties."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
import torch

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import needs_reference, objective
from tests.support.loss_cases import assert_gradient, part_of, random_inputs, sequences_of, settings


def pairs(seed: int, lengths: list[int]) -> LossInputs:
    """Draw a batch of pairs with the weights and shares of `seq_mean_token_mean`."""
    batch = random_inputs(seed, lengths)
    counts = batch.sequence_sums(batch.loss_mask)
    counted = int((counts > 0).sum())
    batch.loss_weights = batch.loss_mask / (counted * batch.on_tokens(counts).clamp(min=1))
    return batch


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def slow(batch: LossInputs, beta: float, smoothing: float, p: np.ndarray) -> float:
    assert batch.reference_log_probs is not None
    losses = []
    for first in range(0, len(batch.lengths), 2):
        margin = []
        for number in (first, first + 1):
            counted = ((sequences_of(batch) == number) & (batch.loss_mask > 0)).numpy()
            margin.append(sum(p[counted]) - sum(batch.reference_log_probs.numpy()[counted]))
        h = beta * (margin[0] - margin[1])
        losses.append(-(1 - smoothing) * log(sigmoid(h)) - smoothing * log(sigmoid(-h)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.2)])
def test_value_and_gradient_equal_the_slow_reference(beta: float, smoothing: float) -> None:
    batch = pairs(0, [5, 9, 4, 6, 12, 7])
    config = settings(loss="dpo", dpo_beta=beta, dpo_label_smoothing=smoothing)
    loss, _ = objective(batch, config)
    at = batch.log_probs.detach().numpy()
    assert loss.item() == pytest.approx(slow(batch, beta, smoothing, at), rel=1e-10)
    (grad,) = torch.autograd.grad(loss, batch.log_probs)
    assert_gradient(grad, lambda p: slow(batch, beta, smoothing, p), at)


def test_metrics_by_hand() -> None:
    """Two pairs of one-token answers: margins 3 and 1, then 0 and 2; beta 1/2: rewards 1.5, 0.5, 0, 1."""
    batch = pairs(0, [3, 3, 3, 3])
    mask = torch.tensor([0, 0, 1.0] * 4, dtype=torch.float64)
    batch.loss_mask, batch.loss_weights, batch.token_share = mask, mask / 4, mask / 4
    batch.reference_log_probs = torch.full((12,), -5.0, dtype=torch.float64)
    with torch.no_grad():
        batch.log_probs[2::3] = torch.tensor([-2.0, -4.0, -5.0, -3.0], dtype=torch.float64)
    loss, metrics = objective(batch, settings(loss="dpo", dpo_beta=0.5))
    assert metrics["actor/dpo_accuracy"].item() == 0.5
    assert metrics["actor/dpo_margin"].item() == pytest.approx((1.0 - 1.0) / 2)
    assert metrics["actor/dpo_reward_chosen"].item() == pytest.approx((1.5 + 0.0) / 2)
    assert metrics["actor/dpo_reward_rejected"].item() == pytest.approx((0.5 + 1.0) / 2)
    assert loss.item() == pytest.approx((-log(sigmoid(1)) - log(sigmoid(-1))) / 2)


def test_metrics_are_means_over_pairs_not_tokens() -> None:
    batch = pairs(1, [30, 20, 3, 4])
    _, metrics = objective(batch, settings(loss="dpo"))
    assert batch.reference_log_probs is not None
    margins = batch.sequence_sums(batch.log_probs - batch.reference_log_probs).detach()
    expected = 0.1 * (margins[::2] - margins[1::2])
    torch.testing.assert_close(metrics["actor/dpo_margin"], expected.mean())


def test_splits_by_pairs_add_up() -> None:
    batch = pairs(2, [5, 9, 4, 6, 12, 7])
    config = settings(loss="dpo")
    whole, metrics = objective(batch, config)
    parts = [objective(part_of(batch, part), config) for part in ([4, 5], [0, 1, 2, 3])]
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), value)


def test_a_large_margin_gives_a_finite_loss_and_gradient() -> None:
    batch = pairs(3, [4, 4])
    with torch.no_grad():
        batch.log_probs[:4] -= 1e5
    loss, _ = objective(batch, settings(loss="dpo", dpo_label_smoothing=0.1))
    (grad,) = torch.autograd.grad(loss, batch.log_probs)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


def test_dpo_needs_the_reference_policy() -> None:
    assert needs_reference(settings(loss="dpo")) and not needs_reference(settings(loss="sft"))
    assert needs_reference(settings(loss="sft", kl_coef=0.1))
