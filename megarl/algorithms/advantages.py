"""Advantage estimators over the outcomes of a batch.

An estimator takes `Outcomes` (rewards, groups and lengths of B samples) and the recipe's `AlgorithmConfig`, and returns
advantages [B]: one number per sample, applied to each of its tokens. It declares the settings it reads, so that a recipe
with an unused setting is refused. Group operations are segment operations: groups may differ in size.

A group of one sample has advantage 0, except with `remax`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from megarl.algorithms.inputs import Outcomes, TokenOutcomes
from megarl.algorithms.moments import Moments, Whitening
from megarl.recipe.algorithm import AlgorithmConfig, check_settings
from megarl.registry import Registry

Estimator = Callable[[Outcomes, "AlgorithmConfig"], np.ndarray]
TokenEstimator = Callable[[TokenOutcomes, "AlgorithmConfig"], np.ndarray]


@dataclass(frozen=True)
class PositionEstimator:
    """An estimator that compares a token with its group's tokens at the same position, the k-th loss token of each sample.

    `terms` returns numbers of each token [K, T], 0 for excluded tokens. They are summed over the group at each position, over
    all ranks. `function` receives the outcomes and the sums at each token's position [K, T], and returns advantages [T].
    """

    function: Callable[[TokenOutcomes, np.ndarray, AlgorithmConfig], np.ndarray]
    terms: Callable[[TokenOutcomes], np.ndarray]


class AdvantageSource(Enum):
    """The processes that estimate advantages, and the unit of an estimate."""

    SAMPLES = "the controller, for each sample"
    TOKENS = "the actor's processes, for each token"
    CRITIC = "the critic's processes, for each token, from its values"


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator. `settings`: the fields of `AlgorithmConfig` that it reads.

    `function` returns an advantage per sample, `of_tokens` one per token (see token_advantages.py), `of_positions` one per
    token from sums over its group; if all are None, a critic estimates advantages (see `source`). `of_steps` returns an
    advantage per step [S], which is added to the advantages of the sample's tokens up to the step's end.
    """

    function: Estimator | None
    settings: tuple[str, ...]
    of_tokens: TokenEstimator | None = None
    of_positions: PositionEstimator | None = None
    of_steps: Estimator | None = None
    needs_greedy: bool = False  # each prompt also gets a greedy sample, scored as a baseline
    needs_siblings: bool = False  # a group of one always has advantage 0
    reads_scores: bool = False  # compares rewards for equality or with 0, which a KL penalty in the reward would break
    needs_kl_in_reward: bool = False

    def __post_init__(self) -> None:
        functions = (self.function, self.of_tokens, self.of_positions)
        assert functions.count(None) >= 2, "an estimator has one source"

    @property
    def source(self) -> AdvantageSource:
        if self.function is not None:
            return AdvantageSource.SAMPLES
        of_tokens = self.of_tokens is not None or self.of_positions is not None
        return AdvantageSource.TOKENS if of_tokens else AdvantageSource.CRITIC

    def whitening(self, moments: Moments, settings: AlgorithmConfig) -> Whitening:
        """Return the whitening of the advantages of tokens with `moments`; the identity without `whiten_advantages`."""
        whitens = "whiten_advantages" in self.settings and settings.whiten_advantages
        return Whitening.by(moments) if whitens else Whitening()


ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


def advantage(name: str, *, settings: tuple[str, ...] = (), **more: Any) -> Callable[[Estimator], Estimator]:
    """Register an estimator under `name`, its value in a recipe's `algorithm.advantage`.

    Further arguments: fields of `AdvantageEstimator`.
    """
    check_settings(settings)

    def add(function: Estimator) -> Estimator:
        ADVANTAGES.register(name)(AdvantageEstimator(function, settings, **more))
        return function

    return add


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's group, sample by sample: all float64 [B]."""

    mean: np.ndarray
    std: np.ndarray  # Bessel-corrected; 0 for a group of one
    size: np.ndarray

    @classmethod
    def of(cls, outcomes: Outcomes) -> GroupStatistics:
        rewards, segment = _segments(outcomes)
        size = np.bincount(segment).astype(np.float64)
        mean = np.bincount(segment, weights=rewards) / size
        squares = np.bincount(segment, weights=(rewards - mean[segment]) ** 2)
        std = np.sqrt(squares / np.maximum(size - 1, 1))
        return cls(mean[segment], std[segment], size[segment])


def _segments(outcomes: Outcomes) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards as float64, and the index of each sample's group among the groups of the batch: both [B]."""
    _, segment = np.unique(outcomes.groups, return_inverse=True)
    return np.asarray(outcomes.rewards, dtype=np.float64), segment


STD_EPS = 1e-6
"""Added to a group's standard deviation, outside the root, as verl and SkyRL do."""


@advantage("grpo", settings=("normalize_by_std",), needs_siblings=True)
def grpo(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Group-relative advantage (DeepSeekMath, arXiv 2402.03300): (r - mean) / (std + 1e-6).

    With ``normalize_by_std`` off: Dr.GRPO (arXiv 2503.20783), r - mean.
    """
    group = GroupStatistics.of(outcomes)
    centred = outcomes.rewards - group.mean
    return centred / (group.std + STD_EPS) if settings.normalize_by_std else centred


@advantage("gdpo", settings=("normalize_by_std", "reward_parts"), needs_siblings=True, reads_scores=True)
def gdpo(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Group reward-decoupled normalization (GDPO, arXiv 2601.05242): the weighted sum over `reward_parts` of each part's
    `grpo` advantage, then whitened over all tokens of the batch. A part with a large spread does not hide the others."""
    total = np.zeros(len(outcomes.rewards))
    for name, weight in settings.reward_parts.items():
        total += weight * grpo(replace(outcomes, rewards=outcomes.parts[name]), settings)
    return Whitening.by(Moments.of(total, outcomes.loss_tokens))(total)


@advantage("rloo", needs_siblings=True)
def rloo(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """REINFORCE leave-one-out (arXiv 2402.14740): r - the mean of the sample's siblings, itself excluded.

    It equals (r - mean) n / (n - 1).
    """
    group = GroupStatistics.of(outcomes)
    return (outcomes.rewards - group.mean) * group.size / np.maximum(group.size - 1, 1)


@advantage("max_rl", needs_siblings=True, reads_scores=True)
def max_rl(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Maximum-likelihood RL (MaxRL, arXiv 2602.02710): (r - mean) / mean, which weights prompts that are rarely solved
    like 1 / success rate. For rewards of 0 or more, in the paper 0 and 1; 0 in a group with a mean of 0 or less."""
    mean = GroupStatistics.of(outcomes).mean
    return np.divide(outcomes.rewards - mean, mean, out=np.zeros(len(mean)), where=mean > 0)


@advantage("remax", needs_greedy=True)
def remax(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """ReMax (arXiv 2310.10505): r - the reward of a greedy sample of the same prompt. Groups of one are allowed."""
    assert outcomes.greedy_rewards is not None
    return outcomes.rewards - outcomes.greedy_rewards


@advantage("reinforce_plus_plus_baseline", needs_siblings=True)
def reinforce_plus_plus_baseline(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): r - group mean, then whitened over all tokens of the batch:
    long samples have more weight in that mean and variance."""
    centred = outcomes.rewards - GroupStatistics.of(outcomes).mean
    return Whitening.by(Moments.of(centred, outcomes.loss_tokens))(centred)


@advantage("opo", needs_siblings=True)
def opo(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """On-policy RL with the optimal baseline (OPO, arXiv 2505.23585): r - the group's length-weighted mean reward. It
    minimizes the gradient's variance if a sample's squared gradient norm is proportional to its length."""
    rewards, segment = _segments(outcomes)
    tokens = np.bincount(segment, weights=outcomes.loss_tokens)
    weighted = np.bincount(segment, weights=rewards * outcomes.loss_tokens)
    return rewards - (weighted / np.maximum(tokens, 1))[segment]


@advantage("soft_mean", settings=("sppo_eta",))
def soft_mean(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Baseline of verl's SPPO: r - log(mean of exp(eta r)) / eta, with the mean over all samples of the batch and eta =
    `sppo_eta`. Groups of one are allowed."""
    rewards, eta = np.asarray(outcomes.rewards, dtype=np.float64), settings.sppo_eta
    largest = rewards.max()
    return rewards - (largest + np.log(np.mean(np.exp(eta * (rewards - largest)))) / eta)


@advantage("gpg", needs_siblings=True, reads_scores=True)
def gpg(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Group policy gradient (GPG, arXiv 2504.02546): alpha (r - mean), with alpha = B / (B - M).

    M counts the samples of groups with equal rewards: they have no gradient, and alpha compensates for their share in the
    loss's mean.
    """
    rewards, segment = _segments(outcomes)
    least, largest = np.full(segment.max() + 1, np.inf), np.full(segment.max() + 1, -np.inf)
    np.minimum.at(least, segment, rewards)
    np.maximum.at(largest, segment, rewards)
    valid = int(np.count_nonzero((largest > least)[segment]))
    return (rewards - GroupStatistics.of(outcomes).mean) * (len(rewards) / max(valid, 1))


@advantage("grpo_passk", settings=("normalize_by_std",), needs_siblings=True)
def grpo_passk(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Best of k (arXiv 2503.19595, k the group's size): only a group's best sample has an advantage, its margin over the
    second best; with ``normalize_by_std`` divided by the group's standard deviation + 1e-6."""
    rewards, segment = _segments(outcomes)
    order = np.lexsort((rewards, segment))  # by group, then reward
    last = np.append(segment[order][1:] != segment[order][:-1], True)
    has_second = np.append(False, segment[order][1:] == segment[order][:-1])
    margin = rewards[order] - np.append(0.0, rewards[order][:-1])
    advantages = np.zeros(len(rewards))
    advantages[order] = np.where(last & has_second, margin, 0.0)
    return advantages / (GroupStatistics.of(outcomes).std + STD_EPS) if settings.normalize_by_std else advantages


@advantage("pass_at_k", settings=("pass_k",), needs_siblings=True, reads_scores=True)
def pass_at_k(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Pass@k training, the analytic form (arXiv 2508.10751). A sample is right if its reward, shaping included, is above 0.

    If m of n samples are wrong, k random samples include a right one with probability p = 1 - C(m, k) / C(n, k). With
    s = sqrt(p (1 - p)), the advantage of a right sample is (1 - p) / s, and of a wrong one
    (1 - p - C(m-1, k-1) / C(n-1, k-1)) / s; both are 0 if s is 0.
    """
    rewards, segment = _segments(outcomes)
    wrong = rewards <= 0
    n = np.bincount(segment).astype(np.float64)
    m = np.bincount(segment, weights=wrong)
    k = settings.pass_k
    if n.min() < k:
        raise ValueError(
            f"algorithm.pass_k is {k}, and a group has {int(n.min())} samples: set it to at most {int(n.min())}"
        )
    fails = _chance_all_from(m, n, k)
    spread = np.sqrt(fails * (1 - fails))
    right_advantage = np.divide(fails, spread, out=np.zeros_like(n), where=spread > 0)
    excess = fails - _chance_all_from(m - 1, n - 1, k - 1)
    wrong_advantage = np.divide(excess, spread, out=np.zeros_like(n), where=spread > 0)
    return np.where(wrong, wrong_advantage[segment], right_advantage[segment])


def _chance_all_from(part: np.ndarray, whole: np.ndarray, k: int) -> np.ndarray:
    """Return C(part, k) / C(whole, k): the probability that k of `whole` items, drawn at random, all belong to `part`."""
    chance = np.ones_like(whole)
    for drawn in range(k):
        chance *= np.maximum(part - drawn, 0.0) / (whole - drawn)
    return chance


# Advantages from a critic's values, computed in the critic's processes; see `returns.gae`.
ADVANTAGES.register("gae")(AdvantageEstimator(None, ("gamma", "lam", "whiten_advantages")))


def uses_critic(settings: AlgorithmConfig) -> bool:
    """Return whether the advantages need a critic."""
    return settings.advantage == "gae"


@advantage("none")
def no_advantage(outcomes: Outcomes, settings: AlgorithmConfig) -> np.ndarray:
    """Zeros [B]: for losses without advantages (SFT)."""
    return np.zeros(len(outcomes.rewards))
