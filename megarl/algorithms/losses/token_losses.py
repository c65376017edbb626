"""Token-level policy losses; PPO, GRPO and DAPO use `ppo_clip`. Losses with one ratio per sequence: sequence_losses.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs, advantages_of, kept
from megarl.algorithms.losses.registry import LOSSES, Metrics, PolicyLoss, policy_loss
from megarl.algorithms.losses.surrogate import CLIP, clipped_surrogate, log_ratio, positive_advantage

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig

__all__ = ["LOSSES", "Metrics", "PolicyLoss", "clipped_surrogate", "log_ratio", "policy_loss"]


@policy_loss("ppo_clip", needs_old_log_probs=True, settings=(*CLIP, "dual_clip"))
def ppo_clip(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate (arXiv 1707.06347). `clip_high`: DAPO's clip-higher (arXiv 2503.14476); `dual_clip`: arXiv 1912.09729.

    ratio = exp(log_probs - old_log_probs); see `clipped_surrogate`.
    """
    change = log_ratio(inputs)
    loss, metrics = clipped_surrogate(change.exp(), inputs, settings)
    return loss, {**metrics, "actor/ppo_kl": -change.detach()}


# No lower bound (arXiv 2506.13585), and ratios clipped at 5 (ScaleRL, arXiv 2510.13786).
@policy_loss("cispo", needs_old_log_probs=True, settings=CLIP, defaults={"clip_low": 1.0, "clip_high": 4.0})
def cispo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(ratio, 1 - low, 1 + high)) A log_prob.

    The ratio is only a weight: a clipped token keeps its gradient. The paper clips only above: `clip_low: 1`.
    """
    change = log_ratio(inputs)
    ratio = change.detach().exp()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return -weight * advantages_of(inputs) * inputs.log_probs, {
        "actor/pg_clipfrac": (weight - ratio).ne_(0),
        "actor/ratio": ratio,
        "actor/ppo_kl": -change.detach(),
    }


@policy_loss(
    "sapo",
    needs_old_log_probs=True,
    settings=("tau_positive", "tau_negative"),
    defaults={"aggregation": "seq_mean_token_mean"},
)
def sapo(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Soft adaptive policy optimization (SAPO, arXiv 2511.20347): -A (4 / tau) sigmoid(tau (ratio - 1)).

    tau is `tau_positive` where A > 0, else `tau_negative`. At ratio 1 the gradient is the policy gradient; it fades
    smoothly on both sides.
    """
    advantages, change = advantages_of(inputs), log_ratio(inputs)
    ratio = change.exp()
    tau = settings.tau_negative + (settings.tau_positive - settings.tau_negative) * positive_advantage(inputs)
    loss = -advantages * (4.0 / tau) * (tau * (ratio - 1.0)).sigmoid()
    return loss, {"actor/ratio": ratio.detach(), "actor/ppo_kl": -change.detach()}


@policy_loss(
    "dppo_tv",
    needs_old_log_probs=True,
    settings=(*CLIP, "ratio_cap", "log_ratio_coef"),
    defaults={"clip_low": 0.15, "clip_high": 0.15},
)
def dppo_tv(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Divergence PPO, binary total variation (DPPO, arXiv 2602.04879): -sg(min(ratio, cap)) A log_prob for tokens
    within a trust region of the probability p: p - old p at most `clip_high` if A > 0, else at least -`clip_low`.

    With `log_ratio_coef` c, every token also has the loss c (log ratio)^2: 1e-3 in prime-rl's default loss.
    """
    assert inputs.old_log_probs is not None
    moved = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    room = (moved + settings.clip_low).lerp(settings.clip_high - moved, positive_advantage(inputs))
    return _trust_region_loss(room.ge_(0), inputs, settings)


@policy_loss("dppo_kl", needs_old_log_probs=True, settings=(*CLIP, "ratio_cap", "log_ratio_coef"))
def dppo_kl(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Divergence PPO, binary KL (DPPO, arXiv 2602.04879): as `dppo_tv`, but the trust region bounds KL(old || current)
    of "this token or another" by `clip_high` (A > 0) or `clip_low` (else), and only where p moves in A's direction.

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with q the old probability.
    """
    return _trust_region_loss(_within_divergence(inputs, settings), inputs, settings)


_PROBABILITY_EPS = 1e-8  # keeps the logarithm of a probability that rounds to 1 finite


def _within_divergence(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """Return 1.0 for the tokens [T] inside the trust region of `dppo_kl`, else 0.0."""
    assert inputs.old_log_probs is not None
    p, q = inputs.log_probs.detach().exp(), inputs.old_log_probs.exp()
    change = inputs.log_probs.detach() - inputs.old_log_probs
    log_odds = ((1.0 - q).add_(_PROBABILITY_EPS) / (1.0 - p).add_(_PROBABILITY_EPS)).log_()
    divergence = (1.0 - q).mul_(log_odds).sub_(change.mul_(q))
    positive = positive_advantage(inputs)
    near = (settings.clip_low - divergence).lerp(settings.clip_high - divergence, positive).ge_(0)
    opposite = (p - q).lerp(q - p, positive).ge_(0)
    return near.maximum(opposite)


def _trust_region_loss(inside: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Return DPPO's loss [T]: no policy gradient for tokens outside the trust region. inside [T]: 1.0 or 0.0."""
    change = log_ratio(inputs)
    ratio = change.detach().exp()
    loss = kept(-ratio.clamp(max=settings.ratio_cap) * advantages_of(inputs) * inputs.log_probs, inside)
    if settings.log_ratio_coef:
        loss = loss + settings.log_ratio_coef * change.square()
    return loss, {
        "actor/pg_clipfrac": 1.0 - inside,
        "actor/ratio": ratio,
        "actor/ppo_kl": -change.detach(),
    }


@policy_loss("dro", needs_old_log_probs=True, settings=("log_ratio_coef",), defaults={"log_ratio_coef": 0.5})
def dro(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Direct reward optimization (DRO, arXiv 2405.19107) with an advantage for its reward minus value:
    -A log_prob + c (log ratio)^2, with c = `log_ratio_coef`, half of the paper's tau (and of verl's `dro_beta`)."""
    change = log_ratio(inputs)
    loss = settings.log_ratio_coef * change.square() - advantages_of(inputs) * inputs.log_probs
    return loss, {"actor/ratio": change.detach().exp(), "actor/ppo_kl": -change.detach()}


@policy_loss("reinforce", needs_old_log_probs=False)
def reinforce(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """The plain policy gradient (Williams, 1992), also GPG's (arXiv 2504.02546): -A log_prob."""
    return -advantages_of(inputs) * inputs.log_probs, {}


@policy_loss("sft", needs_old_log_probs=False, needs_advantages=False, source="sft")
def sft(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the loss tokens: the assistant's turns."""
    return -inputs.log_probs, {}
