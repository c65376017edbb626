"""SPPO and GVPO against numbers worked by hand, slow references, and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import objective
from tests.support.loss_cases import assert_gradient, outcomes, part_of, random_inputs, sequences_of, settings


def batch_of(seed: int, lengths: list[int], groups: list[int]) -> LossInputs:
    """Draw a batch with one advantage per sequence, and the weights of `seq_mean_token_mean`."""
    batch, random = random_inputs(seed, lengths), np.random.default_rng(seed)
    counts = batch.sequence_sums(batch.loss_mask)
    batch.loss_weights = batch.loss_mask / ((counts > 0).sum() * batch.on_tokens(counts).clamp(min=1))
    batch.advantages = torch.tensor(np.repeat(random.normal(size=len(lengths)), lengths))
    batch.groups = torch.tensor(np.repeat(groups, lengths), dtype=torch.float64)
    return batch


def log_ratios(batch: LossInputs, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return D and A of each sequence."""
    assert batch.old_log_probs is not None and batch.advantages is not None
    number, mask = sequences_of(batch).numpy(), batch.loss_mask.numpy() > 0
    change = p - batch.old_log_probs.numpy()
    sums = [change[(number == i) & mask].sum() for i in range(len(batch.lengths))]
    return np.array(sums), np.array([batch.advantages.numpy()[number == i][0] for i in range(len(batch.lengths))])


def slow_gvpo(batch: LossInputs, beta: float, groups: list[int], p: np.ndarray) -> float:
    """Half of the variance of beta D - A in each group, weighted by the group's size."""
    change, advantage = log_ratios(batch, p)
    total = 0.0
    for group in set(groups):
        members = np.array(groups) == group
        if members.sum() > 1:
            total += members.sum() * np.var(beta * change[members] - advantage[members], ddof=1) / 2
    return total / len(groups)


def test_gvpo_equals_the_slow_reference() -> None:
    """Advantages are centred in their group, as `grpo` makes them. The last group has one sample."""
    groups = [4, 4, 4, 2, 2, 9]
    batch, config = batch_of(1, [5, 9, 4, 7, 6, 8], groups), settings(loss="gvpo", gvpo_beta=0.3)
    assert batch.advantages is not None and batch.groups is not None
    for group in set(groups):
        members = batch.groups == group
        first = sorted({float(value) for value in batch.advantages[members]})
        batch.advantages[members] -= sum(first) / len(first)
    loss, _ = objective(batch, config)
    at = batch.log_probs.detach().numpy()
    assert loss.item() == pytest.approx(slow_gvpo(batch, 0.3, groups, at), rel=1e-10)
    (gradient,) = torch.autograd.grad(loss, batch.log_probs)
    assert_gradient(gradient, lambda p: slow_gvpo(batch, 0.3, groups, p), at)


def one_token_each(ratios: list[float], advantages: list[float]) -> LossInputs:
    """A group with one token per sample, with log-ratios `ratios`."""
    batch, count = batch_of(0, [1] * len(ratios), [0] * len(ratios)), len(ratios)
    ones = torch.ones(count, dtype=torch.float64)
    batch.loss_mask, batch.loss_weights, batch.token_share = ones, ones / count, ones / count
    batch.old_log_probs = torch.full((count,), -5.0, dtype=torch.float64)
    batch.log_probs = (torch.tensor(ratios, dtype=torch.float64) - 5.0).requires_grad_()
    batch.advantages = torch.tensor(advantages, dtype=torch.float64)
    return batch


def test_by_hand() -> None:
    """Log-ratios 1 and 3, advantages 1/2 and -1/2."""
    batch = one_token_each([1.0, 3.0], [0.5, -0.5])
    loss, metrics = objective(batch, settings(loss="sppo", sppo_eta=2.0))
    assert loss.item() == pytest.approx(((1 - 1) ** 2 + (3 + 1) ** 2) / 2)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-2.0)
    # beta D = 1/2 and 3/2, without their mean -1/2 and 1/2; residuals -1 and 1; the variance with n - 1 is 2.
    loss, _ = objective(batch, settings(loss="gvpo", gvpo_beta=0.5))
    assert loss.item() == pytest.approx(2 / 2)


def test_gvpo_is_0_where_the_log_ratios_differ_as_the_rewards() -> None:
    """The optimum of the KL-regularized reward: beta log(p / p_old) = R + a constant of the prompt."""
    rewards = np.array([1.0, 0.0, 0.25])
    batch = one_token_each([10 * r + 7 for r in rewards], list(rewards - rewards.mean()))
    loss, _ = objective(batch, settings(loss="gvpo", gvpo_beta=0.1))
    (gradient,) = torch.autograd.grad(loss, batch.log_probs)
    assert loss.item() == pytest.approx(0, abs=1e-12) and gradient.abs().max() < 1e-6


def test_gvpos_first_gradient_is_the_policy_gradient() -> None:
    """Before the policy has moved, a sample's gradient is -beta A n / (n - 1) / N."""
    batch = one_token_each([0.0] * 4, [0.75, -0.25, -0.25, -0.25])
    loss, _ = objective(batch, settings(loss="gvpo", gvpo_beta=0.1))
    (gradient,) = torch.autograd.grad(loss, batch.log_probs)
    np.testing.assert_allclose(gradient, -0.1 * np.array([0.75, -0.25, -0.25, -0.25]) * 4 / 3 / 4)


def test_a_sample_without_loss_tokens_is_not_in_its_group() -> None:
    three, two = one_token_each([1.0, 3.0, 9.0], [0.5, -0.5, 4.0]), one_token_each([1.0, 3.0], [0.5, -0.5])
    three.loss_mask[2] = three.loss_weights[2] = three.token_share[2] = 0.0
    three.loss_weights[:2], three.token_share[:2] = 0.5, 0.5
    config = settings(loss="gvpo", gvpo_beta=0.5)
    assert objective(three, config)[0].item() == pytest.approx(objective(two, config)[0].item())


@pytest.mark.parametrize(("loss", "size"), [("sppo", 1), ("gvpo", 2)])
def test_loss_does_not_depend_on_the_split(loss: str, size: int) -> None:
    batch, config = batch_of(3, [5, 9, 4, 7, 6, 3], [0, 0, 1, 1, 2, 2]), settings(loss=loss)
    whole = objective(batch, config)[0].item()
    parts = [part_of(batch, list(range(start, start + size))) for start in range(0, 6, size)]
    assert sum(objective(part, config)[0].item() for part in parts) == pytest.approx(whole, rel=1e-12)


class TestSoftMean:
    def test_by_hand(self) -> None:
        config = settings(advantage="soft_mean", sppo_eta=2.0)
        estimator = ADVANTAGES["soft_mean"].function
        assert estimator is not None
        baseline = math.log((math.exp(2) + 1 + math.exp(-2)) / 3) / 2
        got = estimator(outcomes([1, 0, -1], [0, 1, 2]), config)
        np.testing.assert_allclose(got, np.array([1, 0, -1]) - baseline)

    def test_is_between_the_mean_and_the_largest_reward(self) -> None:
        estimator = ADVANTAGES["soft_mean"].function
        assert estimator is not None
        rewards = [900.0, 0.0, 100.0]
        baselines = [900 - estimator(outcomes(rewards, [0, 0, 0]), settings(sppo_eta=eta))[0] for eta in (1e-6, 1.0)]
        assert baselines[0] == pytest.approx(1000 / 3, abs=0.1) and baselines[1] == pytest.approx(900 - math.log(3))
