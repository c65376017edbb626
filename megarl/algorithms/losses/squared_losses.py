"""Losses that fit the log-ratio of whole sequences to their rewards by least squares.

The tokens of a sequence carry its loss, so the aggregation `seq_mean_token_mean` gives the mean over sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs, advantages_of
from megarl.algorithms.losses.registry import Metrics, policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig

_DEFAULTS = {"aggregation": "seq_mean_token_mean"}


@policy_loss("sppo", needs_old_log_probs=True, settings=("sppo_eta",), defaults=_DEFAULTS)
def sppo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Self-play preference optimization (SPPO, arXiv 2405.00675): (D - eta A)^2 with the sequence's log-ratio D, the sum of
    log_prob - old_log_prob over its tokens, its advantage A (the mean over its tokens) and eta = `sppo_eta`. The paper
    minimizes it for A = the chance to win against the old policy - 1/2; verl for A of the estimator `soft_mean`."""
    change, metrics = _log_ratios(inputs)
    target = settings.sppo_eta * inputs.sequence_means(advantages_of(inputs))
    return inputs.on_tokens((change - target) ** 2), metrics


@policy_loss(
    "gvpo", needs_old_log_probs=True, settings=("gvpo_beta",), defaults=_DEFAULTS, whole_groups=True
)  # fmt: skip
def gvpo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Group variance policy optimization (GVPO, arXiv 2504.19599): half of the variance over a group (n samples, Bessel's
    correction) of beta D - R, with the sequence's log-ratio D, the sum of log_prob - old_log_prob over its tokens, and beta =
    `gvpo_beta`.

    R enters through the advantage: A = R - group mean (`grpo` without `normalize_by_std`). The loss of a sample is
    n / (n - 1) / 2 (beta D - mean of beta D - A)^2; 0 for a group of one. Samples without loss tokens are not in the group.
    """
    change, metrics = _log_ratios(inputs)
    fitted = settings.gvpo_beta * change
    means, counts = inputs.group_means(fitted)
    residual = fitted - means - inputs.sequence_means(advantages_of(inputs))
    weight = counts / (counts - 1.0).clamp(min=1.0) / 2.0 * (counts > 1)
    return inputs.on_tokens(weight * residual**2), metrics


def _log_ratios(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Return the sum of log_probs - old_log_probs over each sequence's loss tokens [S], and the metrics of both losses."""
    assert inputs.old_log_probs is not None
    change = inputs.log_probs - inputs.old_log_probs
    return inputs.sequence_sums(change), {"actor/ppo_kl": -change.detach()}
