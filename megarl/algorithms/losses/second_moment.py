"""M2PO (arXiv 2510.01161): leave out the few tokens of a mini batch that moved furthest from the policy that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.inputs import LossInputs, TokenSums, advantages_of, kept
from megarl.algorithms.losses.registry import Metrics, Selection, policy_loss
from megarl.algorithms.losses.surrogate import log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig


def second_moment_limit(moments: np.ndarray, mean: float) -> float:
    """Return the lowest of the largest `moments` [n] without which the mean of the others is at most `mean`.

    inf if the mean of all is at most `mean`; the smallest moment if it alone is above it. Moments are at least 0.
    """
    ascending = np.sort(moments)
    means = np.cumsum(ascending) / np.arange(1, len(ascending) + 1)  # of the k smallest, which rise with k
    number = int(np.searchsorted(means, mean, side="right"))  # the largest set that may stay
    return float(ascending[number]) if number < len(ascending) else np.inf


def _scores(inputs: LossInputs, sums: TokenSums, random_draws: np.ndarray, settings: AlgorithmConfig) -> np.ndarray:
    """Return (log ratio)^2 of each loss token, -inf for an excluded token: float64 [T]."""
    moments = log_ratio(inputs).detach().double().square().cpu().numpy()
    return np.where(inputs.counted.cpu().numpy() > 0, moments, -np.inf)


def _candidates(scores: Sequence[np.ndarray], sums: TokenSums, settings: AlgorithmConfig) -> np.ndarray:
    joined = np.concatenate([np.empty(0), *scores])
    return joined[joined > -np.inf]


def _limit(candidates: Sequence[np.ndarray], sums: TokenSums, settings: AlgorithmConfig) -> float:
    return second_moment_limit(np.concatenate([np.empty(0), *candidates]), settings.second_moment)


@policy_loss(
    "m2po",
    needs_old_log_probs=True,
    settings=("second_moment",),
    selection=Selection(_scores, _candidates, _limit),
)
def m2po(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """M2PO (arXiv 2510.01161): -A ratio, without the tokens with the largest (log ratio)^2 of the mini batch: as many that the
    mean of (log ratio)^2 over the others is at most `second_moment`. Nothing is clipped. For stale samples, with
    `old_log_probs: rollout`."""
    assert inputs.selected is not None
    change = log_ratio(inputs)
    ratio, selected = change.exp(), inputs.selected.to(change.dtype)
    return kept(-advantages_of(inputs) * ratio, 1.0 - selected), {
        "actor/second_moment": change.detach().square(),
        "actor/second_moment_excluded": selected,
        "actor/ratio": ratio.detach(),
        "actor/ppo_kl": -change.detach(),
    }
