"""Clip-Cov and KL-Cov (arXiv 2505.22617): the few tokens whose probability and advantage vary together most lower the
policy's entropy fastest, so these, and no others, are held back.

Which they are is decided over a whole mini batch, before its update: each process scores its own tokens
(`PolicyLoss.scores`), and those with the highest scores of all of them are selected (`threshold`). So the choice does
not depend on how the mini batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.inputs import LossInputs, kept
from megarl.algorithms.losses import CLIP, Metrics, advantages_of, clipped_surrogate, log_ratio, policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class TokenSums:
    """Over masked tokens; parts add up."""

    tokens: float = 0.0
    log_probs: float = 0.0
    advantages: float = 0.0

    @classmethod
    def of(cls, inputs: LossInputs) -> TokenSums:
        def total(values: Tensor) -> float:
            return float(inputs.masked(values.detach()).double().sum().item())

        return cls(total(inputs.loss_mask), total(inputs.log_probs), total(advantages_of(inputs)))

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(
            self.tokens + other.tokens, self.log_probs + other.log_probs, self.advantages + other.advantages
        )

    def count(self, share: float) -> int:
        """Tokens that make up `share` of all: at least one."""
        return max(1, round(share * self.tokens))


def covariances(inputs: LossInputs, sums: TokenSums) -> np.ndarray:
    """(log p - its mean) (A - its mean) of each token, means over the mini batch: float64 [T]."""
    tokens = max(sums.tokens, 1.0)
    log_probs, advantages = (
        vector.detach().double().cpu().numpy() for vector in (inputs.log_probs, advantages_of(inputs))
    )
    return (log_probs - sums.log_probs / tokens) * (advantages - sums.advantages / tokens)


def threshold(scores: Sequence[np.ndarray], count: int) -> float:
    """The lowest of the `count` highest scores; inf where there is none above -inf."""
    eligible = np.concatenate([part[part > -np.inf] for part in scores]) if scores else np.empty(0)
    if not eligible.size:
        return np.inf
    return float(np.sort(eligible)[-min(count, eligible.size)])


def _eligible(inputs: LossInputs) -> np.ndarray:
    return inputs.loss_mask.cpu().numpy() > 0


def high_covariances(inputs: LossInputs, sums: TokenSums, lots: np.ndarray, settings: AlgorithmConfig) -> np.ndarray:
    """KL-Cov's scores [T]: the covariances."""
    return np.where(_eligible(inputs), covariances(inputs, sums), -np.inf)


def drawn_covariances(inputs: LossInputs, sums: TokenSums, lots: np.ndarray, settings: AlgorithmConfig) -> np.ndarray:
    """Clip-Cov's scores [T]: the `lots` that were drawn for the tokens whose covariance lies between `cov_low` and
    `cov_high` and which PPO's own clip leaves alone."""
    covariance = covariances(inputs, sums)
    _, metrics = clipped_surrogate(log_ratio(inputs).detach().exp(), inputs, settings)
    inside = (covariance > settings.cov_low) & (covariance < settings.cov_high)
    unclipped = metrics["actor/pg_clipfrac"].cpu().numpy() == 0
    return np.where(_eligible(inputs) & inside & unclipped, lots, -np.inf)


@policy_loss(
    "clip_cov",
    needs_old_log_probs=True,
    settings=(*CLIP, "cov_share", "cov_low", "cov_high"),
    scores=drawn_covariances,
)
def clip_cov(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, without the gradient of a random `cov_share` of all tokens,
    drawn among those whose covariance (log p - mean)(A - mean) is between `cov_low` and `cov_high`."""
    assert inputs.selected is not None
    change = log_ratio(inputs)
    loss, metrics = clipped_surrogate(change.exp(), inputs, settings)
    selected = inputs.selected.to(loss.dtype)
    return kept(loss, 1.0 - selected), {
        **metrics,
        "actor/cov_selected": selected,
        "actor/ppo_kl": -change.detach(),
    }


@policy_loss("kl_cov", needs_old_log_probs=True, settings=("cov_share", "cov_kl_coef"), scores=high_covariances)
def kl_cov(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """KL-Cov (arXiv 2505.22617): -A ratio, and `cov_kl_coef` |log ratio| besides for the `cov_share` of all tokens whose
    covariance (log p - mean)(A - mean) is highest."""
    assert inputs.selected is not None
    change = log_ratio(inputs)
    ratio, selected = change.exp(), inputs.selected.to(change.dtype)
    penalty = settings.cov_kl_coef * kept(change.abs(), selected)
    return -advantages_of(inputs) * ratio + penalty, {
        "actor/cov_selected": selected,
        "actor/ratio": ratio.detach(),
        "actor/ppo_kl": -change.detach(),
    }
