"""The critic's value loss and value statistics. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.algorithms.inputs import kept, with_slope
from megarl.algorithms.moments import Moments, Whitening

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ValueMoments:
    """Moments over the loss tokens of a batch or a part of it; parts add up."""

    values: Moments = Moments()
    returns: Moments = Moments()
    advantages: Moments = Moments()  # returns - values, before whitening

    def __add__(self, other: ValueMoments) -> ValueMoments:
        return ValueMoments(
            self.values + other.values, self.returns + other.returns, self.advantages + other.advantages
        )


@dataclass
class ValueInputs:
    """Inputs of the value loss: per-token vectors [T] of one micro batch. Only `values` carries gradients."""

    values: Tensor  # of the current weights
    old_values: Tensor  # before this step's updates
    returns: Tensor
    loss_mask: Tensor  # 1.0 for a loss token, 0.0 for an excluded token
    loss_weights: Tensor  # weight of each token in the aggregated loss; 0 for excluded tokens
    token_share: Tensor  # loss_mask / number of loss tokens of the mini batch: sums to 1 over the mini batch


def value_loss(inputs: ValueInputs, clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of each token [T], and per-token metrics.

    With `clip`, PPO's clipped form (as in OpenAI baselines' ppo2): the larger of the errors of V and of
    clamp(V, old V - clip, old V + clip), so that a step beyond `clip` gains nothing.
    """
    if clip is None:
        return 0.5 * (inputs.values - inputs.returns).square(), {}
    values = inputs.values.detach()
    error = values - inputs.returns
    loss = 0.5 * error.square()
    near = values.clamp(inputs.old_values - clip, inputs.old_values + clip)  # V if it is within clip of old V
    clipped = 0.5 * (near - inputs.returns).square()
    worse = (clipped - loss).gt_(0)  # such a token has no gradient
    return with_slope(loss.maximum(clipped), error * (1.0 - worse), inputs.values), {"critic/vf_clipfrac": worse}


def value_objective(inputs: ValueInputs, clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one micro batch's contribution to the mini batch's value loss and to each metric; see `objective.objective`."""
    inputs = replace(inputs, values=kept(inputs.values, inputs.loss_mask))  # as `objective` does with log-probs
    token_loss, metrics = value_loss(inputs, clip)

    def total(values: Tensor, weights: Tensor) -> Tensor:
        return kept(values, inputs.loss_mask).mul_(weights).sum()

    loss = total(token_loss, inputs.loss_weights)
    return loss, {
        **{name: total(values, inputs.token_share) for name, values in metrics.items()},
        "critic/vf_loss": loss.detach(),
    }


def value_metrics(moments: ValueMoments, whitening: Whitening) -> dict[str, float]:
    """Return metrics of a batch's values, returns and advantages; advantages as the policy loss reads them."""
    if not moments.values.count:
        return {}
    advantages = moments.advantages
    metrics = {
        **moments.values.metrics("critic/values", Whitening()),
        **moments.returns.metrics("critic/returns", Whitening()),
        **advantages.metrics("critic/advantages", whitening),
    }
    if moments.returns.variance:
        # The advantages before whitening are returns - values.
        metrics["critic/vf_explained_var"] = 1.0 - advantages.variance / moments.returns.variance
    return metrics
