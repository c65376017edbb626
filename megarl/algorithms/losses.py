"""Policy losses per token, and the objective that aggregates them.

A loss takes `LossInputs` and the recipe's `AlgorithmConfig` and returns the loss of each token [T]
and metrics, each a per-token vector [T] whose mean over the masked tokens is reported. It declares
what it needs, so that passes nobody uses are not run. Aggregation is apart: see `objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT
from megarl.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.schema import AlgorithmConfig

TokenLoss = Callable[[LossInputs, "AlgorithmConfig"], "tuple[Tensor, dict[str, Tensor]]"]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss. `needs_old_log_probs`: the proximal policy's log-probs are computed first."""

    function: TokenLoss
    needs_old_log_probs: bool


LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def policy_loss(name: str, *, needs_old_log_probs: bool) -> Callable[[TokenLoss], TokenLoss]:
    """Register a loss under `name`, the word a recipe's `algorithm.loss` uses."""

    def add(function: TokenLoss) -> TokenLoss:
        LOSSES.register(name)(PolicyLoss(function, needs_old_log_probs))
        return function

    return add


@policy_loss("ppo_clip", needs_old_log_probs=True)
def ppo_clip(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv 1707.06347), with clip-higher (DAPO, arXiv 2503.14476) and dual clip (arXiv 1912.09729).

    ratio = exp(log_probs - old_log_probs); loss = max(-A ratio, -A clip(ratio, 1 - low, 1 + high));
    with dual clip c and A < 0: min(loss, -A c). The log-ratio is clamped to +-20 before exp.
    """
    assert inputs.old_log_probs is not None and inputs.advantages is not None
    log_ratio = (inputs.log_probs - inputs.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss = unclipped.maximum(clipped)
    metrics = {
        "actor/pg_clipfrac": (clipped > unclipped).float(),
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/ratio": ratio.detach(),
    }
    if settings.dual_clip is not None:
        bound = -inputs.advantages * settings.dual_clip
        applies = (inputs.advantages < 0) & (loss > bound)
        loss = bound.where(applies, loss)
        metrics["actor/pg_clipfrac_lower"] = applies.float()
    return loss, metrics


@policy_loss("sft", needs_old_log_probs=False)
def sft(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the masked tokens."""
    return -inputs.log_probs, {}


def objective(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar that one micro batch adds to the mini batch's loss, and what it adds to each metric.

    Both are normalised over the whole mini batch already (through `loss_weights` and `token_share`):
    summed over micro batches and over data- and context-parallel ranks they are the mini batch's loss
    and the metrics' means over its masked tokens.
    """
    token_loss, token_metrics = LOSSES[settings.loss].function(inputs, settings)
    # where, not a product: a masked token may hold inf or nan, and 0 * inf is nan.
    masked = inputs.loss_mask > 0

    def total(values: Tensor, weights: Tensor) -> Tensor:
        return (values.where(masked, values.new_zeros(())) * weights).sum()

    loss = total(token_loss, inputs.loss_weights)
    metrics = {name: total(values, inputs.token_share) for name, values in token_metrics.items()}
    metrics["actor/pg_loss"] = loss.detach()
    if inputs.entropy is not None:
        metrics["actor/entropy"] = total(inputs.entropy.detach(), inputs.token_share)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * total(inputs.entropy, inputs.loss_weights)
    if settings.kl_coef:
        assert inputs.reference_log_probs is not None
        kl = total(
            KL_ESTIMATORS[settings.kl_estimator](inputs.log_probs, inputs.reference_log_probs), inputs.loss_weights
        )
        metrics["actor/kl_loss"] = kl.detach()
        loss = loss + settings.kl_coef * kl
    metrics["actor/loss"] = loss.detach()
    return loss, metrics
