"""The optimal token baseline, against numbers worked by hand, its definition, autograd and exact gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import AdvantageSource
from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.inputs import Outcomes, TokenOutcomes
from megarl.algorithms.moments import Moments, Whitening
from megarl.algorithms.optimal_baseline import at_tokens, gradient_energy, group_lengths, sums_by_position
from megarl.recipe.algorithm import AlgorithmConfig

TAILS = ("return", "zero")


def estimate(parts: list[TokenOutcomes], lengths: list[int], tail: str = "return") -> list[np.ndarray]:
    """Advantages of micro batches on two ranks, which add up their sums."""
    estimator = ADVANTAGES["optimal_token_baseline"].of_positions
    assert estimator is not None
    settings = AlgorithmConfig(advantage="optimal_token_baseline", tail_baseline=tail)  # type: ignore[arg-type]
    ranks = [sums_by_position([(part, estimator.terms(part)) for part in parts[n::2]], lengths) for n in (0, 1)]
    sums = ranks[0] + ranks[1] if len(parts) > 1 else ranks[0]
    return [estimator.function(part, at_tokens(part, sums, lengths), settings) for part in parts]


def energies(per_token: list[float]) -> dict[str, np.ndarray]:
    """Fields that give each token the squared gradient norm `per_token`: a token of probability 1/2 has sum_v p_v^2."""
    return {"log_probs": np.full(len(per_token), np.log(0.5)), "squares": np.array(per_token)}


def test_by_hand() -> None:
    """Two samples with two and three tokens; W is 1, 3 and 1, 2, 3. Excluded tokens precede each."""
    mask = np.array([False, True, True, False, True, True, True])
    outcomes = TokenOutcomes(
        np.array([4.0, 1.0]), mask, [3, 4], groups=np.array([0, 0]), **energies([9.0, 1.0, 2.0, 9.0, 1.0, 1.0, 1.0])
    )
    # B is (4 + 1) / 2, then (4 * 3 + 1 * 2) / 5 = 2.8; at the third position the second sample is alone.
    own_tail, zero = (estimate([outcomes], [3], tail)[0] for tail in TAILS)
    np.testing.assert_allclose(own_tail, [0, 1.5, 1.2, 0, -1.5, -1.8, 0], atol=1e-7)
    np.testing.assert_allclose(zero, [0, 1.5, 1.2, 0, -1.5, -1.8, 1], atol=1e-7)


def test_energy_is_the_squared_gradient_of_the_log_prob() -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(6, 11, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(0, 11, (6,))
    log_p = logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad(log_p.gather(1, tokens[:, None]).sum(), logits)
    expected = gradient.square().sum(1).numpy()
    outcomes = TokenOutcomes(
        np.zeros(2), np.array([True, True, True, True, False, True]), [2, 4], groups=np.zeros(2, dtype=int),
        log_probs=log_p.gather(1, tokens[:, None])[:, 0].detach().numpy(),
        squares=log_p.exp().square().sum(1).detach().numpy(),
    )  # fmt: skip
    first, second = np.split(expected, [2])
    second[2] = 0.0  # tool output has no gradient
    np.testing.assert_allclose(gradient_energy(outcomes), [*np.cumsum(first), *np.cumsum(second)], rtol=1e-12)


def random_batch(seed: int, *, weights: bool = True) -> TokenOutcomes:
    """Ten samples of three groups, in no order, with tool output, a sample without loss tokens, and rejected tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 12, 10).tolist()
    total = sum(lengths)
    mask = random.random(total) < 0.7
    mask[: lengths[0]] = False
    return TokenOutcomes(
        random.normal(size=10), mask, lengths, random.normal(size=total), random.normal(size=total),
        groups=np.array([0, 1, 0, 2, 1, 0, 1, 2, 0, 0]), log_probs=-random.exponential(size=total),
        squares=random.random(total), weights=random.random(total) * (random.random(total) < 0.9) if weights else None,
    )  # fmt: skip


def lengths_of(outcomes: TokenOutcomes) -> list[int]:
    counts = [int(part.sum()) for part in np.split(outcomes.mask, np.cumsum(outcomes.lengths)[:-1])]
    assert outcomes.groups is not None
    return group_lengths(Outcomes(outcomes.rewards, outcomes.groups, np.array(counts)))


def slow(outcomes: TokenOutcomes, tail: str) -> np.ndarray:
    """The definition, sample by sample and position by position."""
    bounds = np.cumsum([0, *outcomes.lengths])
    samples = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        tokens = [t for t in range(start, stop) if outcomes.mask[t]]
        received = [outcomes.step_rewards[t] + outcomes.penalties[t] for t in tokens]
        if tokens:
            received[-1] += outcomes.rewards[number]
        energy, total = [], 0.0
        for t in tokens:
            total += max(1 - 2 * np.exp(outcomes.log_probs[t]) + outcomes.squares[t], 0) * outcomes.weights[t] ** 2
            energy.append(total + 1e-8)
        samples.append((outcomes.groups[number], tokens, [sum(received[k:]) for k in range(len(tokens))], energy))
    advantages = np.zeros(bounds[-1])
    for group, tokens, returns, _ in samples:
        for k, t in enumerate(tokens):
            reaching = [s for s in samples if s[0] == group and len(s[1]) > k]
            counted = [s for s in reaching if outcomes.weights[s[1][k]] > 0]
            weight = sum(s[3][k] for s in counted)
            baseline = sum(s[2][k] * s[3][k] for s in counted) / weight if weight else 0.0
            started = sum(1 for s in samples if s[0] == group and s[1])
            if tail == "zero" and len(reaching) == 1 and started > 1:
                baseline = 0.0
            advantages[t] = returns[k] - baseline
    return advantages


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("seed", range(5))
def test_slow_reference(seed: int, tail: str) -> None:
    outcomes = random_batch(seed)
    (got,) = estimate([outcomes], lengths_of(outcomes), tail)
    np.testing.assert_allclose(got, slow(outcomes, tail), rtol=1e-9, atol=1e-12)


def one_sample(outcomes: TokenOutcomes, number: int) -> TokenOutcomes:
    stop = int(np.sum(outcomes.lengths[: number + 1]))
    tokens = slice(stop - outcomes.lengths[number], stop)
    of_tokens = ("mask", "step_rewards", "penalties", "log_probs", "squares", "weights")
    return TokenOutcomes(
        rewards=outcomes.rewards[number : number + 1],
        lengths=[outcomes.lengths[number]],
        groups=outcomes.groups[number : number + 1],
        **{name: getattr(outcomes, name)[tokens] for name in of_tokens},
    )


def test_the_split_into_micro_batches_does_not_matter() -> None:
    outcomes = random_batch(7)
    lengths, order = lengths_of(outcomes), [3, 0, 9, 1, 4, 2, 8, 5, 7, 6]
    parts = [one_sample(outcomes, number) for number in order]
    (whole,) = estimate([outcomes], lengths)
    by_sample = np.split(whole, np.cumsum(outcomes.lengths)[:-1])
    for number, got in zip(order, estimate(parts, lengths), strict=True):
        np.testing.assert_allclose(got, by_sample[number], rtol=1e-9, atol=1e-12)


class TestExactGradient:
    """One token of three, sampled as often as its probability, so that a group's mean is the exact expectation."""

    p = np.array([0.5, 0.25, 0.25])
    tokens = np.array([0, 0, 1, 2])
    rewards = np.array([2.0, 0.0, -0.5])

    def gradients(self, advantages: np.ndarray) -> np.ndarray:
        return advantages[:, None] * (np.eye(3)[self.tokens] - self.p)

    def advantages(self) -> np.ndarray:
        outcomes = TokenOutcomes(
            self.rewards[self.tokens], np.ones(4, dtype=bool), [1] * 4, groups=np.zeros(4, dtype=int),
            log_probs=np.log(self.p)[self.tokens], squares=np.full(4, (self.p**2).sum()),
        )  # fmt: skip
        return estimate([outcomes], [1])[0]

    def test_no_bias(self) -> None:
        expected = (self.p * self.rewards) - self.p * (self.p @ self.rewards)  # d E[reward] / d logits
        np.testing.assert_allclose(self.gradients(self.advantages()).mean(0), expected, atol=1e-8)

    def test_no_other_baseline_has_a_smaller_variance(self) -> None:
        rewards = self.rewards[self.tokens]
        variance = {
            baseline: self.gradients(rewards - baseline).var(0).sum() for baseline in np.linspace(-2, 3, 501).tolist()
        }
        best = self.gradients(self.advantages()).var(0).sum()
        assert best == pytest.approx(min(variance.values()), rel=1e-3) and best <= min(variance.values()) + 1e-9
        assert best < 0.9 * self.gradients(rewards - rewards.mean()).var(0).sum()


class TestProperties:
    def test_equal_weights_give_the_mean_of_the_samples_that_are_left(self) -> None:
        outcomes = random_batch(2, weights=False)
        equal = np.ones(len(outcomes.mask))
        outcomes = replace(
            outcomes, log_probs=np.log(0.5) * equal, squares=0.5 * equal, step_rewards=None, penalties=None
        )
        (got,) = estimate([outcomes], lengths_of(outcomes))
        parts = zip(
            *(np.split(values, np.cumsum(outcomes.lengths)[:-1]) for values in (got, outcomes.mask)), strict=True
        )
        advantages = [values[mask] for values, mask in parts]
        for group in range(3):
            members = np.flatnonzero(outcomes.groups == group)
            for number in members:
                for position, advantage in enumerate(advantages[number]):
                    left = [outcomes.rewards[each] for each in members if len(advantages[each]) > position]
                    assert advantage == pytest.approx(outcomes.rewards[number] - np.mean(left), abs=1e-9)

    def test_certain_tokens_have_the_mean(self) -> None:
        """A policy that chose every token with certainty has W = 0, which would divide by 0."""
        certain = {"log_probs": np.zeros(4), "squares": np.ones(4)}
        outcomes = TokenOutcomes(
            np.array([1.0, 3.0]), np.ones(4, dtype=bool), [2, 2], groups=np.array([0, 0]), **certain
        )
        np.testing.assert_allclose(estimate([outcomes], [2])[0], [-1, -1, 1, 1], rtol=1e-9)

    def test_a_constant_added_to_all_rewards_changes_nothing(self) -> None:
        outcomes = random_batch(3)
        before, after = (
            estimate([replace(outcomes, rewards=outcomes.rewards + shift)], lengths_of(outcomes))[0] for shift in (0, 5)
        )
        counted = outcomes.mask & (outcomes.weights > 0)
        np.testing.assert_allclose(before[counted], after[counted], atol=1e-9)

    @pytest.mark.parametrize("tail", TAILS)
    def test_a_group_of_one_has_no_advantage(self, tail: str) -> None:
        outcomes = random_batch(4, weights=False)
        alone = replace(outcomes, groups=np.arange(10))
        np.testing.assert_allclose(estimate([alone], lengths_of(alone), tail)[0], 0, atol=1e-9)

    def test_excluded_samples_do_not_count(self) -> None:
        """A sample outside the loss (a filler, or truncated and filtered) changes no other advantage."""
        outcomes = random_batch(5)
        assert not outcomes.mask[: outcomes.lengths[0]].any()
        changed = replace(outcomes, rewards=np.where(np.arange(10) == 0, 1e6, outcomes.rewards))
        lengths = lengths_of(outcomes)
        np.testing.assert_array_equal(estimate([outcomes], lengths)[0], estimate([changed], lengths)[0])


def test_advantages_are_not_whitened() -> None:
    """Whitening would subtract another baseline."""
    estimator, moments = ADVANTAGES["optimal_token_baseline"], Moments.of(np.array([1.0, 2.0, 6.0]))
    assert estimator.source is AdvantageSource.TOKENS
    assert estimator.whitening(moments, AlgorithmConfig()) == Whitening()
    assert ADVANTAGES["reinforce_plus_plus"].whitening(moments, AlgorithmConfig()).mean == 3.0
