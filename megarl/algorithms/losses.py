"""Policy losses per token, and how one is registered.

A loss takes `LossInputs` and the recipe's `AlgorithmConfig` and returns the loss of each token [T] and metrics, each a
per-token vector [T] whose mean over the masked tokens is reported. It declares what it needs, so that passes nobody
uses are not run, and the settings it reads, so that one which nobody reads is refused. Aggregation is apart: see
`objective`. Losses whose ratio is a whole sequence's are in sequence_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.algorithms.inputs import LossInputs, kept, with_slope
from megarl.algorithms.kl import limited
from megarl.recipe.algorithm import check_settings
from megarl.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megarl.algorithms.covariance import TokenSums
    from megarl.recipe.algorithm import AlgorithmConfig

Metrics = dict[str, "Tensor"]
TokenLoss = Callable[[LossInputs, "AlgorithmConfig"], "tuple[Tensor, Metrics]"]
Scores = Callable[[LossInputs, "TokenSums", "np.ndarray", "AlgorithmConfig"], "np.ndarray"]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss. `needs_old_log_probs`: it compares the policy with the proximal one.
    `settings`: the fields of `AlgorithmConfig` that it reads. `scores`: for a loss that treats some tokens of the mini
    batch in a way of their own, those with the highest: see covariance.py."""

    function: TokenLoss
    needs_old_log_probs: bool
    settings: tuple[str, ...]
    scores: Scores | None = None
    source: str = "rollout"  # the `train.source` that it learns from
    needs_advantages: bool = True
    needs_reference: bool = False  # the reference policy's log-probs, whatever `kl_coef` is
    needs_top: bool = False  # and those of the tokens that it finds likeliest, which a teacher tells
    whole_groups: bool = False  # it compares siblings: a group's samples stand one after the other in one micro batch


LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def policy_loss(
    name: str, *, needs_old_log_probs: bool, settings: tuple[str, ...] = (), **more: Any
) -> Callable[[TokenLoss], TokenLoss]:
    """Register a loss under `name`, the word a recipe's `algorithm.loss` uses. Arguments are those of `PolicyLoss`."""

    check_settings(settings)

    def add(function: TokenLoss) -> TokenLoss:
        LOSSES.register(name)(PolicyLoss(function, needs_old_log_probs, settings, **more))
        return function

    return add


CLIP = ("clip_low", "clip_high")


def log_ratio(inputs: LossInputs) -> Tensor:
    """log_probs - old_log_probs [T], within +-20: so that exp() of a planted extreme is large, not inf."""
    assert inputs.old_log_probs is not None
    return limited(inputs.log_probs - inputs.old_log_probs)


def advantages_of(inputs: LossInputs) -> Tensor:
    assert inputs.advantages is not None
    return inputs.advantages


def positive_advantage(inputs: LossInputs) -> Tensor:
    """1.0 where the advantage is above 0, else 0.0: [T].

    Here and below comparisons are made in place, on floats: a vector of bools takes ten times as long to make and to use.
    """
    return advantages_of(inputs).clone().gt_(0)


def clipped_surrogate(ratio: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) [T]; with dual clip c and A < 0: at most -A c."""
    downhill, fixed = -advantages_of(inputs), ratio.detach()
    unclipped = downhill * fixed
    loss = unclipped.maximum(fixed.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high).mul_(downhill))
    metrics = {"actor/pg_clipfrac": (loss - unclipped).gt_(0), "actor/ratio": fixed}
    if settings.dual_clip is not None:
        bounded = loss.minimum(downhill.abs() * settings.dual_clip)  # which lies above every loss where A > 0
        metrics["actor/pg_clipfrac_lower"] = (loss - bounded).gt_(0)
        loss = bounded
    passing = (loss - unclipped).eq_(0)
    return with_slope(loss, downhill * passing, ratio), metrics


@policy_loss("ppo_clip", needs_old_log_probs=True, settings=(*CLIP, "dual_clip"))
def ppo_clip(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate (arXiv 1707.06347), with clip-higher (DAPO, arXiv 2503.14476) and dual clip (arXiv 1912.09729).

    ratio = exp(log_probs - old_log_probs); see `clipped_surrogate`.
    """
    change = log_ratio(inputs)
    loss, metrics = clipped_surrogate(change.exp(), inputs, settings)
    return loss, {**metrics, "actor/ppo_kl": -change.detach()}


@policy_loss("cispo", needs_old_log_probs=True, settings=CLIP)
def cispo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(ratio, 1 - low, 1 + high)) A log_prob.

    The ratio only weighs: a clipped token keeps its gradient. The paper clips above alone: `clip_low: 1`.
    """
    change = log_ratio(inputs)
    ratio = change.detach().exp()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return -weight * advantages_of(inputs) * inputs.log_probs, {
        "actor/pg_clipfrac": (weight - ratio).ne_(0),
        "actor/ratio": ratio,
        "actor/ppo_kl": -change.detach(),
    }


@policy_loss("sapo", needs_old_log_probs=True, settings=("tau_positive", "tau_negative"))
def sapo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Soft adaptive policy optimisation (SAPO, arXiv 2511.20347): -A (4 / tau) sigmoid(tau (ratio - 1)).

    tau is `tau_positive` where A > 0, else `tau_negative`. At ratio 1 the gradient is the policy gradient; it fades
    on both sides, without a bound at which it ends.
    """
    advantages, change = advantages_of(inputs), log_ratio(inputs)
    ratio = change.exp()
    tau = settings.tau_negative + (settings.tau_positive - settings.tau_negative) * positive_advantage(inputs)
    loss = -advantages * (4.0 / tau) * (tau * (ratio - 1.0)).sigmoid()
    return loss, {"actor/ratio": ratio.detach(), "actor/ppo_kl": -change.detach()}


@policy_loss("dppo_tv", needs_old_log_probs=True, settings=(*CLIP, "ratio_cap"))
def dppo_tv(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Divergence PPO, binary total variation (DPPO, arXiv 2602.04879): -sg(min(ratio, cap)) A log_prob for tokens
    whose probability p has not moved too far: p - old p at most `clip_high` where A > 0, at least -`clip_low` else."""
    assert inputs.old_log_probs is not None
    moved = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    room = (moved + settings.clip_low).lerp(settings.clip_high - moved, positive_advantage(inputs))
    return _trusted(room.ge_(0), inputs, settings)


@policy_loss("dppo_kl", needs_old_log_probs=True, settings=(*CLIP, "ratio_cap"))
def dppo_kl(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Divergence PPO, binary KL (DPPO, arXiv 2602.04879): as `dppo_tv`, but what may not pass `clip_high` (A > 0) or
    `clip_low` (else) is KL(old || current) of "this token or another one", and only where p moves A's way.

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with q the old probability.
    """
    return _trusted(_within_divergence(inputs, settings), inputs, settings)


_PROBABILITY_EPS = 1e-8  # keeps the logarithm of a probability that rounds to 1 finite


def _within_divergence(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """1.0 for the tokens [T] that `dppo_kl` learns from, 0.0 for the others."""
    assert inputs.old_log_probs is not None
    p, q = inputs.log_probs.detach().exp(), inputs.old_log_probs.exp()
    change = inputs.log_probs.detach() - inputs.old_log_probs
    others = ((1.0 - q).add_(_PROBABILITY_EPS) / (1.0 - p).add_(_PROBABILITY_EPS)).log_()
    divergence = (1.0 - q).mul_(others).sub_(change.mul_(q))
    positive = positive_advantage(inputs)
    near = (settings.clip_low - divergence).lerp(settings.clip_high - divergence, positive).ge_(0)
    other_way = (p - q).lerp(q - p, positive).ge_(0)
    return near.maximum(other_way)


def _trusted(inside: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """DPPO's loss [T] of the tokens that are `inside` (1.0) the trust region, 0 for the others (0.0)."""
    change = log_ratio(inputs).detach()
    ratio = change.exp()
    loss = -ratio.clamp(max=settings.ratio_cap) * advantages_of(inputs) * inputs.log_probs
    return kept(loss, inside), {
        "actor/pg_clipfrac": 1.0 - inside,
        "actor/ratio": ratio,
        "actor/ppo_kl": -change,
    }


@policy_loss("reinforce", needs_old_log_probs=False)
def reinforce(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """The plain policy gradient (Williams, 1992), also GPG's (arXiv 2504.02546): -A log_prob."""
    return -advantages_of(inputs) * inputs.log_probs, {}


@policy_loss("sft", needs_old_log_probs=False, needs_advantages=False, source="sft")
def sft(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the masked tokens."""
    return -inputs.log_probs, {}
