"""The clipped surrogate of PPO and DAPO, and the ratios and signs of advantages that losses share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs, advantages_of, with_slope
from megarl.algorithms.kl import limited
from megarl.algorithms.losses.registry import Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig

CLIP = ("clip_low", "clip_high")


def log_ratio(inputs: LossInputs) -> Tensor:
    """Return log_probs - old_log_probs [T], clamped to +-20 so that exp() of an outlier is large, not inf."""
    assert inputs.old_log_probs is not None
    return limited(inputs.log_probs - inputs.old_log_probs)


def positive_advantage(inputs: LossInputs) -> Tensor:
    """Return 1.0 where the advantage is above 0, else 0.0: [T].

    Comparisons in losses are in place and on floats: a bool vector takes ten times as long to create and to use.
    """
    return advantages_of(inputs).clone().gt_(0)


def clipped_surrogate(ratio: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Return max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) [T]; with dual clip c and A < 0 at most -A c."""
    negated, detached = -advantages_of(inputs), ratio.detach()
    unclipped = negated * detached
    loss = unclipped.maximum(detached.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high).mul_(negated))
    metrics = {"actor/pg_clipfrac": (loss - unclipped).gt_(0), "actor/ratio": detached}
    if settings.dual_clip is not None:
        bounded = loss.minimum(negated.abs() * settings.dual_clip)  # no effect where A > 0: the loss is negative there
        metrics["actor/pg_clipfrac_lower"] = (loss - bounded).gt_(0)
        loss = bounded
    has_gradient = (loss - unclipped).eq_(0)
    return with_slope(loss, negated * has_gradient, ratio), metrics
