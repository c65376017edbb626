"""Token weights of the rollout correction with losses that have one ratio per sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import objective
from tests.support.loss_cases import assert_gradient, correcting, random_inputs, sequences_of

LENGTHS = [9, 2, 14, 3, 6]


def batch_of(seed: int) -> LossInputs:
    """Random sequences with one advantage and one weight per sequence, as GRPO and a mean over sequences give them."""
    batch = random_inputs(seed, LENGTHS)
    sequence, counted = sequences_of(batch), batch.loss_mask > 0
    batch.advantages = torch.tensor([1.5, -0.5, 2.0, -1.0, 0.7], dtype=torch.float64)[sequence]
    counts = torch.stack([batch.loss_mask[sequence == number].sum() for number in range(len(LENGTHS))])
    batch.loss_weights = torch.where(counted, 1.0 / (counts[sequence] * (counts > 0).sum()), 0.0)
    return batch


def gradient(batch: LossInputs, loss: str, weights: str) -> torch.Tensor:
    config = correcting(weights=weights)
    config.loss, config.clip_low, config.clip_high = loss, 0.04, 0.06
    (result,) = torch.autograd.grad(objective(batch, config)[0], batch.log_probs)
    return result


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_a_weight_scales_the_gradient_of_its_token(loss: str, seed: int) -> None:
    """min(s A, clip(s) A) of GSPO-token (arXiv 2507.18071, section 4.3) times rho of the token, truncated at 2, in float64:
    s_t = sg(s) p_t / sg(p_t). verl's gspo computes the same."""
    batch = batch_of(seed)
    counted, sequence = (batch.loss_mask > 0).numpy(), sequences_of(batch).numpy()
    assert batch.old_log_probs is not None and batch.rollout_log_probs is not None and batch.advantages is not None
    old, engine, a, w = (
        v.numpy() for v in (batch.old_log_probs, batch.rollout_log_probs, batch.advantages, batch.loss_weights)
    )
    fixed = batch.log_probs.detach().numpy().copy()
    s = np.zeros(len(old))
    for number in range(len(LENGTHS)):
        tokens = (sequence == number) & counted
        if tokens.any():
            s[sequence == number] = np.exp((fixed - old)[tokens].mean())
    rho = np.minimum(np.exp(old - engine), 2.0)

    def value(p: np.ndarray) -> float:
        ratio = s * np.exp(p - fixed)
        gain = np.minimum(ratio * a, np.clip(ratio, 0.96, 1.06) * a)
        return -float((w * rho * gain)[counted].sum())

    assert_gradient(gradient(batch, loss, "token"), value, fixed)


@pytest.mark.parametrize("weights", ["none", "sequence", "geometric"])
def test_without_token_weights_the_form_of_the_ratio_does_not_matter(weights: str) -> None:
    batch = batch_of(3)
    torch.testing.assert_close(gradient(batch, "gspo", weights), gradient(batch, "gspo_token", weights))
