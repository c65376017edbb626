"""GAE, whitening and the value loss against hand-worked numbers and slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.moments import Moments, Whitening
from megarl.algorithms.returns import gae, returns_to_go
from megarl.algorithms.values import ValueInputs, ValueMoments, value_loss, value_objective


def slow_gae(
    reward: float,
    values: list[float],
    mask: list[bool],
    gamma: float,
    lam: float,
    token_rewards: list[float] | None = None,
) -> tuple[list[float], list[float]]:
    """One sequence, token by token from the end, as in the paper; `token_rewards`: further rewards of tokens."""
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    next_value = next_advantage = 0.0
    earned = reward
    for t in reversed(range(len(values))):
        if not mask[t]:
            continue
        earned += token_rewards[t] if token_rewards else 0.0
        delta = earned + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        returns[t] = advantages[t] + values[t]
        next_value, next_advantage, earned = values[t], advantages[t], 0.0
    return advantages, returns


def test_gae_by_hand() -> None:
    """A prompt token, then three chosen ones with a tool's answer between; gamma 1/2, lam 1/2, reward 8.

    deltas: 8 - 4 = 4; 0.5 * 4 - 2 = 0; 0.5 * 2 - 1 = 0.
    advantages: 4; 0 + 0.25 * 4 = 1; 0 + 0.25 * 1 = 0.25.
    """
    values = np.array([9.0, 1.0, 2.0, 9.0, 9.0, 4.0])
    mask = np.array([False, True, True, False, False, True])
    advantages, returns = gae(np.array([8.0]), values, mask, [6], gamma=0.5, lam=0.5)
    assert advantages.tolist() == [0, 0.25, 1, 0, 0, 4]
    assert returns.tolist() == [0, 1.25, 3, 0, 0, 8]


def test_lam_1_gives_reward_minus_value_and_lam_0_the_td_error() -> None:
    values, mask = np.array([0.5, -1.0, 2.0]), np.ones(3, dtype=bool)
    advantages, returns = gae(np.array([3.0]), values, mask, [3], gamma=1.0, lam=1.0)
    assert returns == pytest.approx([3, 3, 3]) and advantages == pytest.approx([2.5, 4, 1])
    advantages, _ = gae(np.array([3.0]), values, mask, [3], gamma=1.0, lam=0.0)
    assert advantages == pytest.approx([-1.5, 3, 1])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.9), (0.9, 0.0)])
def test_gae_equals_the_slow_reference_of_each_sequence(gamma: float, lam: float) -> None:
    random = np.random.default_rng(0)
    lengths = [1, 2, 7, 33, 64, 5, 1, 400]
    values = random.normal(size=sum(lengths)).astype(np.float32)
    mask = random.random(sum(lengths)) < 0.7
    mask[:1], mask[3:10] = True, False  # a sequence of one token, and one without a chosen one
    rewards = random.normal(size=len(lengths))
    advantages, returns = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam)
    start = 0
    for length, reward in zip(lengths, rewards, strict=True):
        span = slice(start, start + length)
        expected = slow_gae(reward, values[span].astype(np.float64).tolist(), mask[span].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[span], expected[0], rtol=0, atol=1e-11)
        np.testing.assert_allclose(returns[span], expected[1], rtol=0, atol=1e-11)
        start += length


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_gae_and_returns_include_token_rewards(gamma: float) -> None:
    """GAE with token rewards equals the slow reference of each sequence; with values of 0 and lambda 1 it is the
    return-to-go."""
    random = np.random.default_rng(2)
    lengths = [1, 9, 40, 3]
    values, steps = random.normal(size=53), random.normal(size=53)
    mask, rewards = random.random(53) < 0.7, random.normal(size=4)
    advantages, returns = gae(rewards, values, mask, lengths, gamma=gamma, lam=0.9, token_rewards=steps)
    start = 0
    for length, reward in zip(lengths, rewards, strict=True):
        part = slice(start, start + length)
        expected = slow_gae(reward, values[part].tolist(), mask[part].tolist(), gamma, 0.9, steps[part].tolist())
        np.testing.assert_allclose(advantages[part], expected[0], atol=1e-12)
        np.testing.assert_allclose(returns[part], expected[1], atol=1e-12)
        start += length
    to_go = returns_to_go(rewards, mask, lengths, gamma=gamma, token_rewards=steps)
    plain = gae(rewards, np.zeros(53), mask, lengths, gamma=gamma, lam=1.0, token_rewards=steps)[0]
    np.testing.assert_allclose(to_go, plain, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 1e-5, 0.3, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 1500])
def test_returns_equal_the_slow_reference_at_any_length_and_discount(length: int, gamma: float) -> None:
    """Lengths are below and above the block size of the sum."""
    rewards = np.random.default_rng(length).normal(size=length)
    slow, following = np.zeros(length), 3.0
    for t in reversed(range(length)):
        following = slow[t] = rewards[t] + (gamma if t + 1 < length else 1.0) * following
    got = returns_to_go(np.array([3.0]), np.ones(length, dtype=bool), [length], gamma=gamma, token_rewards=rewards)
    np.testing.assert_allclose(got, slow, rtol=1e-10, atol=1e-10)


def test_returns_and_advantages_are_zero_without_loss_tokens() -> None:
    assert not returns_to_go(np.array([1.0]), np.zeros(4, dtype=bool), [4], gamma=1.0).any()
    advantages, returns = gae(np.array([1.0]), np.ones(4), np.zeros(4, dtype=bool), [4], gamma=1.0, lam=1.0)
    assert not advantages.any() and not returns.any()


def test_moments_add_up_without_cancellation() -> None:
    numbers = 1e6 + np.random.default_rng(1).normal(size=1000)  # sums of squares would cancel here
    parts = np.split(numbers, [0, 1, 10, 700])
    whole = sum((Moments.of(part) for part in parts), Moments())
    assert whole.count == 1000 and whole.mean == pytest.approx(numbers.mean(), rel=1e-15)
    assert whole.variance == pytest.approx(numbers.var(ddof=1), rel=1e-9)
    assert (whole.least, whole.largest) == (numbers.min(), numbers.max())
    assert Moments().variance == Moments.of(np.ones(1)).variance == 0


def test_whitening() -> None:
    numbers = np.array([1.0, 2.0, 3.0, 6.0])
    white = Whitening.by(Moments.of(numbers))(numbers)
    assert white.mean() == pytest.approx(0) and white.var(ddof=1) == pytest.approx(1)
    assert Whitening.by(Moments.of(np.full(5, 3.0)))(np.full(5, 3.0)).tolist() == [0] * 5
    assert Whitening()(numbers).tolist() == numbers.tolist()


def inputs(values: list[float], old: list[float], returns: list[float]) -> ValueInputs:
    mask = torch.tensor([0.0] + [1.0] * (len(values) - 1))
    return ValueInputs(
        values=torch.tensor(values, requires_grad=True),
        old_values=torch.tensor(old),
        returns=torch.tensor(returns),
        loss_mask=mask,
        loss_weights=mask / 4,
        token_share=mask / 2,
    )


def test_value_loss_by_hand() -> None:
    """Error 1 within the clip; 2 where the clipped error is 3.5 and counts; 4 where the clipped one is smaller."""
    x = inputs([1.0, 2.0, 8.0], [0.9, 0.0, 5.0], [2.0, 4.0, 4.0])
    plain, metrics = value_loss(x, None)
    assert plain.tolist() == [0.5, 2.0, 8.0] and metrics == {}
    clipped, metrics = value_loss(x, 0.5)
    assert clipped.tolist() == [0.5, 6.125, 8.0]
    assert metrics["critic/vf_clipfrac"].tolist() == [0, 1, 0]
    clipped.sum().backward()
    assert x.values.grad is not None and x.values.grad.tolist() == [-1, 0, 4], "beyond the clip nothing is gained"


def test_values_within_the_clip_range_are_not_counted_as_clipped() -> None:
    """Rounding must not count as clipping: old + (new - old) is not always new."""
    generator = torch.Generator().manual_seed(0)
    new, old, returns = torch.randn(3, 1000, generator=generator)
    x = inputs((new / 100).tolist(), old.tolist(), returns.tolist())
    loss, metrics = value_loss(x, 10.0)
    assert not metrics["critic/vf_clipfrac"].any()
    torch.testing.assert_close(loss, value_loss(x, None)[0], rtol=0, atol=0)


def test_value_objective_weighs_and_masks() -> None:
    """Gradients too: V = 2 clips to 0.5, which is worse, and does not move; V = 8 stays above its clip, which would be better."""
    x = inputs([float("inf"), 2.0, 8.0], [0.0, 0.0, 5.0], [float("nan"), 4.0, 4.0])
    x.values.requires_grad_()
    loss, metrics = value_objective(x, 0.5)
    assert loss.item() == (6.125 + 8.0) / 4
    (gradient,) = torch.autograd.grad(loss, x.values)
    assert gradient.tolist() == [0.0, 0.0, 1.0]
    assert {name: value.item() for name, value in metrics.items()} == {
        "critic/vf_loss": loss.item(), "critic/vf_clipfrac": 0.5,
    }  # fmt: skip


def test_metrics_of_moments_are_computed_after_whitening() -> None:
    whitening = Whitening(mean=1.0, scale=2.0)
    metrics = Moments.of(np.array([0.0, 3.0])).metrics("critic/advantages", whitening)
    assert metrics == {"critic/advantages/mean": 1.0, "critic/advantages/max": 4.0, "critic/advantages/min": -2.0}
    assert Moments().metrics("critic/advantages", whitening) == {}


def test_value_moments_add_up_part_by_part() -> None:
    first, second = (ValueMoments(*(Moments.of(np.array(numbers)) for numbers in part)) for part in (
        ([1.0], [2.0, 4.0], [8.0]), ([3.0, 5.0], [6.0], [9.0, 0.0])
    ))  # fmt: skip
    both = first + second
    assert [part.count for part in (both.values, both.returns, both.advantages)] == [3, 3, 3]
    assert [part.mean for part in (both.values, both.returns, both.advantages)] == pytest.approx([3, 4, 17 / 3])
    assert (both.values.least, both.returns.largest, both.advantages.least) == (1, 6, 0)


def test_returns_skip_excluded_tokens() -> None:
    """Each of two sequences has excluded tokens inside; the second starts where the first ends."""
    mask = np.array([1, 0, 1, 0, 1, 0, 0, 1], dtype=bool)
    got = returns_to_go(np.array([8.0, 2.0]), mask, [4, 4], gamma=0.5)
    assert got.tolist() == [4, 0, 8, 0, 1, 0, 0, 2]
