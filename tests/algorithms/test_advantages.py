"""Advantage estimators against numbers worked by hand, slow references from the papers' equations, and properties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from math import comb, sqrt

import numpy as np
import pytest

from megarl.algorithms.advantages import AdvantageSource, uses_critic
from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.inputs import Outcomes, TokenOutcomes
from megarl.recipe.algorithm import AlgorithmConfig
from tests.support.loss_cases import outcomes, settings

OF_GROUPS = ["grpo", "rloo", "max_rl", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "pass_at_k"]
ELSEWHERE = [
    "gdpo",
    "grpo_process",
    "on_policy_distillation",
    "optimal_token_baseline",
    "soft_mean",
]  # tests/algorithms/test_process_rewards.py, test_optimal_baseline.py, test_squared_losses.py, tests/rollout/test_distillation.py


def advantages(name: str, batch: Outcomes, **values: object) -> np.ndarray:
    function = ADVANTAGES[name].function
    assert function is not None
    return function(batch, settings(advantage=name, **values))


def test_every_estimator_is_tested_here() -> None:
    assert set(ADVANTAGES.names()) == {*OF_GROUPS, "remax", "reinforce_plus_plus", "gae", "none", *ELSEWHERE}


class TestByHand:
    def test_grpo(self) -> None:
        # Group 7: rewards 1, 0, 0, 1: mean 1/2, squares 4 * 1/4 = 1, std = sqrt(1/3).
        # Group 3: rewards 2, 4: mean 3, squares 2, std = sqrt(2).
        got = advantages("grpo", outcomes([1, 2, 0, 0, 4, 1.0], [7, 3, 7, 7, 3, 7]))
        half, full = 0.5 / (sqrt(1 / 3) + 1e-6), 1 / (sqrt(2) + 1e-6)
        np.testing.assert_allclose(got, [half, -full, -half, -half, full, half], rtol=1e-12)

    def test_dr_grpo_is_grpo_without_std(self) -> None:
        got = advantages("grpo", outcomes([1, 0, 0, 1.0], [0] * 4), normalize_by_std=False)
        np.testing.assert_allclose(got, [0.5, -0.5, -0.5, 0.5])

    def test_rloo(self) -> None:
        # Siblings of 6: (2 + 1) / 2 = 1.5; of 2: 3.5; of 1: 4. The pair: each other's reward.
        got = advantages("rloo", outcomes([6, 3, 2, 1, 5], [0, 1, 0, 0, 1]))
        np.testing.assert_allclose(got, [4.5, -2, -1.5, -3, 2])

    def test_max_rl(self) -> None:
        # Means 1/4 and 3/4: a success weighs 3 and 1/3, a failure -1 in both; no success, no advantage.
        got = advantages("max_rl", outcomes([1, 0, 0, 0, 1, 1, 1, 0, 0, 0], [0] * 4 + [1] * 4 + [2] * 2))
        np.testing.assert_allclose(got, [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0], rtol=1e-12)
        np.testing.assert_array_equal(advantages("max_rl", outcomes([-1, 0], [0, 0])), [0, 0])

    def test_gdpo(self) -> None:
        # Group 0: accuracy 1 and 0 (mean 1/2, std sqrt(1/2)), style 10 and 30. Group 1: accuracy equal, style 0 and 4.
        # With weights 2 and 1 the sums are (1, -1), (-1, 1) in units of std 1 / sqrt(2); then whitened over 1, 1, 2, 2 tokens.
        batch = replace(
            outcomes([0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 2, 2]),
            parts={"accuracy": np.array([1.0, 0, 1, 1]), "style": np.array([10.0, 30, 0, 4])},
        )
        got = advantages("gdpo", batch, reward_parts={"accuracy": 2.0, "style": 1.0})
        half = sqrt(0.5)  # half a difference over its standard deviation, |x| / sqrt(2 x^2)
        before = np.array([2 * half - half, -2 * half + half, -half, half])
        tokens = np.repeat(before, [1, 1, 2, 2])
        expected = (before - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(got, expected, rtol=1e-5)

    def test_reinforce_plus_plus_baseline(self) -> None:
        # Centred: 1, -1 with 1 and 3 tokens. Over 4 tokens: mean (1 - 3) / 4 = -1/2,
        # squares 1 * 1.5^2 + 3 * 0.5^2 = 3, variance 3 / 3 = 1: (1 + 1/2) / 1 and (-1 + 1/2) / 1.
        got = advantages("reinforce_plus_plus_baseline", outcomes([3, 1], [0, 0], [1, 3]))
        np.testing.assert_allclose(got, np.array([1.5, -0.5]) / sqrt(1 + 1e-8), rtol=1e-12)

    def test_opo(self) -> None:
        # Baseline of the first group (1 * 8 + 3 * 24) / 32 = 2.5; of the second (4 * 10 + 0 * 30) / 40 = 1.
        got = advantages("opo", outcomes([1, 4, 3, 0], [5, 6, 5, 6], [8, 10, 24, 30]))
        np.testing.assert_allclose(got, [-1.5, 3, 0.5, -1])

    def test_gpg(self) -> None:
        # 7 samples, 3 of a group of equals (0.1 three times does not quite sum to 0.3): alpha = 7 / 4.
        batch = outcomes([1, 0.1, 0, 0.1, 0, 0.1, 0], [0, 1, 0, 1, 0, 1, 0])
        expected = np.array([0.75, 0, -0.25, 0, -0.25, 0, -0.25]) * 7 / 4
        np.testing.assert_allclose(advantages("gpg", batch), expected, atol=1e-15)

    def test_grpo_passk(self) -> None:
        # Best 5, second 3; a tie for the best has no winner.
        batch = outcomes([1, 5, 2, 3, 2, 0], [0, 0, 1, 0, 1, 1])
        plain = advantages("grpo_passk", batch, normalize_by_std=False)
        np.testing.assert_allclose(plain, [0, 2, 0, 0, 0, 0])
        # mean 3, squares 4 + 4 + 0 = 8, std = 2.
        np.testing.assert_allclose(advantages("grpo_passk", batch), [0, 2 / (2 + 1e-6), 0, 0, 0, 0])

    def test_pass_at_k(self) -> None:
        # n = 4, m = 3 wrong, k = 2. Fails: C(3,2) / C(4,2) = 1/2; spread 1/2. Right: 1/2 / 1/2 = 1.
        # Wrong: (1/2 - C(2,1) / C(3,1)) / 1/2 = (1/2 - 2/3) * 2 = -1/3.
        got = advantages("pass_at_k", outcomes([0, 1, -1, 0], [0] * 4), pass_k=2)
        np.testing.assert_allclose(got, [-1 / 3, 1, -1 / 3, -1 / 3], rtol=1e-12)

    def test_pass_at_k_of_a_group_too_small_is_refused(self) -> None:
        with pytest.raises(ValueError, match="a group has 2 samples"):
            advantages("pass_at_k", outcomes([0, 1], [0, 0]), pass_k=3)

    def test_remax(self) -> None:
        batch = Outcomes(np.array([1, 0, 3.0]), np.array([0, 0, 1]), np.ones(3), np.array([0.5, 0.5, 2.0]))
        np.testing.assert_array_equal(advantages("remax", batch), [0.5, -0.5, 1.0])
        assert ADVANTAGES["remax"].needs_greedy and not ADVANTAGES["grpo"].needs_greedy

    def test_none_gives_zeros_and_gae_has_no_estimator_here(self) -> None:
        np.testing.assert_array_equal(advantages("none", outcomes([1, 2.0], [0, 0])), [0, 0])
        assert ADVANTAGES["gae"].function is None and ADVANTAGES["gae"].of_tokens is None
        assert ADVANTAGES["grpo"].source is AdvantageSource.SAMPLES
        assert ADVANTAGES["reinforce_plus_plus"].source is AdvantageSource.TOKENS
        for name in ADVANTAGES.names():
            critic = ADVANTAGES[name].source is AdvantageSource.CRITIC
            assert uses_critic(settings(advantage=name)) == critic, name

    def test_reinforce_plus_plus(self) -> None:
        # Outcome 8, penalties 1, 2 and 3 of the chosen tokens; the hole between earns nothing and takes no time.
        # gamma 1/2: 8 - 3 = 5; -2 + 5/2 = 1/2; -1 + 1/4 = -3/4. The second sequence: 6, then 6/2.
        batch = TokenOutcomes(
            rewards=np.array([8.0, 6.0]),
            penalties=-np.array([9.0, 1, 2, 9, 3, 0, 0]),
            mask=np.array([0, 1, 1, 0, 1, 1, 1], dtype=bool),
            lengths=[5, 2],
        )
        got = ADVANTAGES["reinforce_plus_plus"].of_tokens(batch, settings(gamma=0.5))
        np.testing.assert_allclose(got, [0, -0.75, 0.5, 0, 5, 3, 6])


# One group at a time, sample by sample, as the papers write it.


def slow_grpo(r: list[float], lengths: list[int], s: AlgorithmConfig) -> list[float]:
    mean = sum(r) / len(r)
    std = sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1)) if len(r) > 1 else 0.0
    return [(x - mean) / ((std + 1e-6) if s.normalize_by_std else 1) for x in r]


def slow_rloo(r: list[float], lengths: list[int], s: AlgorithmConfig) -> list[float]:
    return [x - sum(r[:i] + r[i + 1 :]) / (len(r) - 1) if len(r) > 1 else 0.0 for i, x in enumerate(r)]


def slow_max_rl(r: list[float], lengths: list[int], s: AlgorithmConfig) -> list[float]:
    return [x * len(r) / sum(r) - 1 for x in r] if sum(r) > 0 else [0.0] * len(r)


def slow_opo(r: list[float], lengths: list[int], s: AlgorithmConfig) -> list[float]:
    baseline = sum(x * n for x, n in zip(r, lengths, strict=True)) / sum(lengths)
    return [x - baseline for x in r]


def slow_grpo_passk(r: list[float], lengths: list[int], s: AlgorithmConfig) -> list[float]:
    if len(r) == 1:
        return [0.0]
    best, second = sorted(r)[-1], sorted(r)[-2]
    mean = sum(r) / len(r)
    std = sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1))
    return [(best - second) / ((std + 1e-6) if s.normalize_by_std else 1) if x == best else 0.0 for x in r]


def slow_pass_at_k(r: list[float], lengths: list[int], s: AlgorithmConfig) -> list[float]:
    """The advantage is a mean over all sets of k that a sample can be in, of how far the set's score is from the mean
    over sets, in standard deviations of that score (arXiv 2508.10751, section 3)."""
    sets = list(itertools.combinations(range(len(r)), s.pass_k))
    scores = [float(any(r[i] > 0 for i in members)) for members in sets]
    mean = sum(scores) / len(scores)
    std = sqrt(mean * (1 - mean))
    if std == 0:
        return [0.0] * len(r)
    by_sample = [[x for members, x in zip(sets, scores, strict=True) if i in members] for i in range(len(r))]
    return [(sum(mine) / len(mine) - mean) / std for mine in by_sample]


SLOW: dict[str, Callable[[list[float], list[int], AlgorithmConfig], list[float]]] = {
    "grpo": slow_grpo,
    "rloo": slow_rloo,
    "max_rl": slow_max_rl,
    "opo": slow_opo,
    "grpo_passk": slow_grpo_passk,
    "pass_at_k": slow_pass_at_k,
}


def random_outcomes(seed: int, sizes: list[int]) -> Outcomes:
    random = np.random.default_rng(seed)
    groups = random.permutation(np.repeat(random.permutation(100)[: len(sizes)], sizes))
    return Outcomes(random.normal(size=len(groups)).round(2), groups, random.integers(1, 50, len(groups)))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", SLOW)
def test_slow_reference(name: str, normalize: bool) -> None:
    batch = random_outcomes(1, [3, 8, 5, 3])
    if name != "pass_at_k":
        batch = random_outcomes(1, [1, 8, 5, 2, 1])
    config = settings(advantage=name, normalize_by_std=normalize, pass_k=3)
    got = advantages(name, batch, normalize_by_std=normalize, pass_k=3)
    for group in np.unique(batch.groups):
        in_group = batch.groups == group
        expected = SLOW[name](batch.rewards[in_group].tolist(), batch.loss_tokens[in_group].tolist(), config)
        np.testing.assert_allclose(got[in_group], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_max_rl_climbs_the_likelihood(p: float) -> None:
    """arXiv 2602.02710: the mean policy gradient over all outcomes of N samples that succeed with probability p is the
    gradient of log p's expansion -sum (1 - p)^k / k. A group without success has no advantage, which takes the term of
    order N away: sum of (1 - p)^(k - 1) over k < N."""
    size, expected = 5, 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=size):
        r = np.array(rewards)
        score = (r - p) / (p * (1 - p))  # d log probability / dp
        expected += (
            np.prod(np.where(r > 0, p, 1 - p)) * (advantages("max_rl", outcomes(list(r), [0] * size)) * score).mean()
        )
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)))


def test_slow_reinforce_plus_plus_baseline() -> None:
    """Token by token: every token of the batch holds its sample's centred reward, and all of them are whitened."""
    batch = random_outcomes(2, [4, 3, 1])
    tokens, owners = [], []
    for i, (reward, group, count) in enumerate(zip(batch.rewards, batch.groups, batch.loss_tokens, strict=True)):
        tokens += [reward - batch.rewards[batch.groups == group].mean()] * int(count)
        owners += [i] * int(count)
    whitened = (np.array(tokens) - np.mean(tokens)) / np.sqrt(np.var(tokens, ddof=1) + 1e-8)
    got = advantages("reinforce_plus_plus_baseline", batch)
    np.testing.assert_allclose(got[owners], whitened, rtol=1e-9)


def test_slow_gpg() -> None:
    batch = random_outcomes(3, [4, 3, 2])
    batch.rewards[batch.groups == batch.groups[0]] = 0.3
    group_of_equals = int((batch.groups == batch.groups[0]).sum())
    alpha = 9 / (9 - group_of_equals)
    expected = [
        alpha * (r - batch.rewards[batch.groups == g].mean()) for r, g in zip(batch.rewards, batch.groups, strict=True)
    ]
    np.testing.assert_allclose(advantages("gpg", batch), expected, atol=1e-12)


@pytest.mark.parametrize("name", OF_GROUPS)
class TestProperties:
    batch = random_outcomes(4, [4, 7, 5, 4])

    def of(self, name: str, batch: Outcomes) -> np.ndarray:
        return advantages(name, batch, pass_k=2)

    def test_order_of_samples_does_not_matter(self, name: str) -> None:
        order = np.random.default_rng(0).permutation(len(self.batch.rewards))
        shuffled = Outcomes(self.batch.rewards[order], self.batch.groups[order], self.batch.loss_tokens[order])
        np.testing.assert_allclose(self.of(name, shuffled), self.of(name, self.batch)[order], atol=1e-12)

    def test_group_numbers_do_not_matter(self, name: str) -> None:
        renamed = Outcomes(self.batch.rewards, 1000 - 3 * self.batch.groups, self.batch.loss_tokens)
        np.testing.assert_allclose(self.of(name, renamed), self.of(name, self.batch), atol=1e-12)

    def test_equal_rewards_have_no_advantage(self, name: str) -> None:
        got = self.of(name, Outcomes(np.full(20, 3.0), self.batch.groups, self.batch.loss_tokens))
        np.testing.assert_allclose(got, np.zeros(20), atol=1e-9)

    def test_a_higher_reward_never_has_a_lower_advantage_within_a_group(self, name: str) -> None:
        got = self.of(name, self.batch)
        for group in np.unique(self.batch.groups):
            in_group = self.batch.groups == group
            assert (np.diff(got[in_group][np.argsort(self.batch.rewards[in_group])]) >= -1e-12).all()

    def test_a_group_of_one_has_no_advantage(self, name: str) -> None:
        if name == "pass_at_k":
            assert advantages(name, outcomes([1.0], [0]), pass_k=1).tolist() == [0.0]
        else:
            assert advantages(name, outcomes([5.0], [0], [3])).tolist() == [0.0]

    def test_advantages_are_finite_without_loss_tokens(self, name: str) -> None:
        nothing = Outcomes(self.batch.rewards, self.batch.groups, np.zeros(20, dtype=int))
        assert np.isfinite(self.of(name, nothing)).all()


@pytest.mark.parametrize(("name", "power"), [("grpo", 0), ("grpo_passk", 0), ("rloo", 1), ("opo", 1), ("gpg", 1)])
def test_scale_of_rewards(name: str, power: int) -> None:
    batch = random_outcomes(5, [4, 6, 3])
    larger = Outcomes(batch.rewards * 8, batch.groups, batch.loss_tokens)
    np.testing.assert_allclose(advantages(name, larger), advantages(name, batch) * 8**power, rtol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk"])
def test_a_constant_added_to_a_groups_rewards_changes_nothing(name: str) -> None:
    batch = random_outcomes(6, [4, 6, 3])
    shifted = Outcomes(batch.rewards + 0.5 * batch.groups, batch.groups, batch.loss_tokens)
    np.testing.assert_allclose(advantages(name, shifted), advantages(name, batch), atol=1e-9)


def test_pass_at_k_with_k_1_is_the_pass_rate_whitened() -> None:
    """C(m, 1) / C(n, 1) = m / n: right (1 - p) / s and wrong -p / s, with p the share of right ones."""
    got = advantages("pass_at_k", outcomes([1, 0, 0, 0, 1], [0] * 5), pass_k=1)
    p = 2 / 5
    s = sqrt(p * (1 - p))
    np.testing.assert_allclose(got, [(1 - p) / s, -p / s, -p / s, -p / s, (1 - p) / s])


def test_pass_at_k_of_large_groups_does_not_overflow() -> None:
    rewards = [1.0] + [0.0] * 1023
    got = advantages("pass_at_k", outcomes(rewards, [0] * 1024), pass_k=512)
    fails = comb(1023, 512) / comb(1024, 512)
    assert got[0] == pytest.approx(fails / sqrt(fails * (1 - fails))) and math.isfinite(got[1])
