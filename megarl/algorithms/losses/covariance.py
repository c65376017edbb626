"""Clip-Cov and KL-Cov (arXiv 2505.22617): restrain the tokens with the highest covariance of log-prob and advantage.

These few tokens lower the policy's entropy fastest. They are selected over a whole mini batch, before its update: the `cov_share`
with the highest scores (`Selection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.inputs import LossInputs, TokenSums, advantages_of, kept
from megarl.algorithms.losses.registry import Metrics, Selection, policy_loss
from megarl.algorithms.losses.surrogate import CLIP, clipped_surrogate, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig


def covariances(inputs: LossInputs, sums: TokenSums) -> np.ndarray:
    """Return (log p - mean) (A - mean) of each token, with means over the mini batch: float64 [T]."""
    tokens = max(sums.tokens, 1.0)
    log_probs, advantages = (
        vector.detach().double().cpu().numpy() for vector in (inputs.log_probs, advantages_of(inputs))
    )
    return (log_probs - sums.log_probs / tokens) * (advantages - sums.advantages / tokens)


def highest(scores: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return the `count` highest scores above -inf, ascending; fewer if there are fewer. NaN is not a score."""
    joined = np.concatenate([np.empty(0), *scores])
    return np.sort(joined[joined > -np.inf])[-count:]


def threshold(scores: Sequence[np.ndarray], count: int) -> float:
    """Return the lowest of the `count` highest scores; inf if no score is above -inf."""
    top = highest(scores, count)
    return float(top[0]) if top.size else np.inf


def _candidates(scores: Sequence[np.ndarray], sums: TokenSums, settings: AlgorithmConfig) -> np.ndarray:
    return highest(scores, sums.count(settings.cov_share))


def _limit(candidates: Sequence[np.ndarray], sums: TokenSums, settings: AlgorithmConfig) -> float:
    return threshold(candidates, sums.count(settings.cov_share))


def _eligible(inputs: LossInputs) -> np.ndarray:
    return inputs.counted.cpu().numpy() > 0


def kl_cov_scores(
    inputs: LossInputs, sums: TokenSums, random_draws: np.ndarray, settings: AlgorithmConfig
) -> np.ndarray:
    """Return KL-Cov's scores [T]: the covariance of a loss token, -inf for an excluded token."""
    return np.where(_eligible(inputs), covariances(inputs, sums), -np.inf)


def clip_cov_scores(
    inputs: LossInputs, sums: TokenSums, random_draws: np.ndarray, settings: AlgorithmConfig
) -> np.ndarray:
    """Return Clip-Cov's scores [T]: `random_draws` [T] for loss tokens that PPO does not clip, with a covariance
    between `cov_low` and `cov_high`; -inf for all others."""
    covariance = covariances(inputs, sums)
    _, metrics = clipped_surrogate(log_ratio(inputs).detach().exp(), inputs, settings)
    inside = (covariance > settings.cov_low) & (covariance < settings.cov_high)
    unclipped = metrics["actor/pg_clipfrac"].cpu().numpy() == 0
    return np.where(_eligible(inputs) & inside & unclipped, random_draws, -np.inf)


@policy_loss(
    "clip_cov",
    needs_old_log_probs=True,
    settings=(*CLIP, "cov_share", "cov_low", "cov_high"),
    selection=Selection(clip_cov_scores, _candidates, _limit),
)
def clip_cov(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, without the gradient of a random `cov_share` of all tokens,
    drawn from tokens with a covariance (log p - mean)(A - mean) between `cov_low` and `cov_high`."""
    assert inputs.selected is not None
    change = log_ratio(inputs)
    loss, metrics = clipped_surrogate(change.exp(), inputs, settings)
    selected = inputs.selected.to(loss.dtype)
    return kept(loss, 1.0 - selected), {
        **metrics,
        "actor/cov_selected": selected,
        "actor/ppo_kl": -change.detach(),
    }


@policy_loss(
    "kl_cov",
    needs_old_log_probs=True,
    settings=("cov_share", "cov_kl_coef"),
    selection=Selection(kl_cov_scores, _candidates, _limit),
    defaults={"cov_share": 2e-3},
)
def kl_cov(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """KL-Cov (arXiv 2505.22617): -A ratio, plus `cov_kl_coef` |log ratio| for the `cov_share` of all tokens with the
    highest covariance (log p - mean)(A - mean)."""
    assert inputs.selected is not None
    change = log_ratio(inputs)
    ratio, selected = change.exp(), inputs.selected.to(change.dtype)
    penalty = settings.cov_kl_coef * kept(change.abs(), selected)
    return -advantages_of(inputs) * ratio + penalty, {
        "actor/cov_selected": selected,
        "actor/ratio": ratio.detach(),
        "actor/ppo_kl": -change.detach(),
    }
