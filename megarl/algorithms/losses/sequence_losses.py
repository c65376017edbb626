"""Policy losses with one importance ratio per sequence, applied to each of its tokens.

With the aggregation `seq_mean_token_mean`, as in the papers, every sequence has the same weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs, advantages_of, with_slope
from megarl.algorithms.losses.registry import Metrics, policy_loss
from megarl.algorithms.losses.surrogate import CLIP, clipped_surrogate, log_ratio, positive_advantage

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig


_PER_SEQUENCE = {"aggregation": "seq_mean_token_mean"}
_GSPO_DEFAULTS = {"clip_low": 3e-4, "clip_high": 4e-4, **_PER_SEQUENCE}


@policy_loss("gspo", needs_old_log_probs=True, settings=(*CLIP, "dual_clip"), defaults=_GSPO_DEFAULTS)
def gspo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Group sequence policy optimization (GSPO, arXiv 2507.18071): PPO's clipped surrogate with the sequence ratio
    s = exp(mean of log_probs - old_log_probs over its tokens). The paper's bounds: 3e-4 and 4e-4.

    With `correction.weights: token`, each token's weight scales its gradient, as in `gspo_token`.
    """
    if settings.correction.weights == "token":  # s itself would give every token the mean weight of the sequence
        return gspo_token(inputs, settings)
    change = log_ratio(inputs)
    ratio = inputs.on_tokens(inputs.sequence_means(change).exp())
    loss, metrics = clipped_surrogate(ratio, inputs, settings)
    return loss, {**metrics, "actor/ppo_kl": -change.detach()}


@policy_loss("gspo_token", needs_old_log_probs=True, settings=(*CLIP, "dual_clip"), defaults=_GSPO_DEFAULTS)
def gspo_token(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """GSPO-token (arXiv 2507.18071, section 4.3): GSPO's ratio with a per-token gradient, sg(s) p / sg(p), so that tokens
    of a sequence may have different advantages. With equal advantages its gradient is GSPO's."""
    change = log_ratio(inputs).detach()
    ratio = inputs.on_tokens(inputs.sequence_means(change).exp())
    loss, metrics = clipped_surrogate(with_slope(ratio, ratio, inputs.log_probs), inputs, settings)
    return loss, {**metrics, "actor/ppo_kl": -change}


_GMPO_DEFAULTS = {"clip_low": 0.4, "clip_high": 0.4, **_PER_SEQUENCE}


@policy_loss("gmpo", needs_old_log_probs=True, settings=CLIP, defaults=_GMPO_DEFAULTS)
def gmpo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Geometric-mean policy optimization (GMPO, arXiv 2507.20673): -A exp(mean over the sequence's tokens of the
    log-ratio d, clipped on the side where A gains).

    Per token: min(d, clip(d, -low, high)) if A > 0, max of the two if A < 0. The bounds apply to the log-ratio: 0.4 and
    0.4 in the paper. A is the mean of the tokens' advantages.
    """
    advantages, change = advantages_of(inputs), log_ratio(inputs)
    fixed = change.detach()
    bounded = fixed.clamp(min=-settings.clip_low).lerp(fixed.clamp(max=settings.clip_high), positive_advantage(inputs))
    clipped = (bounded - fixed).ne_(0)
    ratio = inputs.on_tokens(inputs.sequence_means(with_slope(bounded, 1.0 - clipped, change)).exp())
    return -inputs.on_tokens(inputs.sequence_means(advantages)) * ratio, {
        "actor/pg_clipfrac": clipped,
        "actor/ratio": ratio.detach(),
        "actor/ppo_kl": -fixed,
    }
