"""Losses between the policy's and a teacher's distribution, over the teacher's most likely tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.losses.registry import Metrics, policy_loss
from megarl.algorithms.losses.rows import by_rows

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig

_LEAST_REST = 1e-6  # probability of all other tokens together: the precision of float32 sums of probabilities


@policy_loss(
    "gkd",
    needs_old_log_probs=False,
    settings=("distill_top_k", "distill_beta", "distill_max", "distill_rest", "distill_min_log_prob"),
    needs_advantages=False,
    needs_reference=True,
    needs_top=True,
)
def gkd(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """On-policy generalized knowledge distillation (GKD, arXiv 2306.13649): the divergence of the policy from the teacher
    at each token that the policy sampled. With b = `distill_beta`: if b = 0, KL(teacher || policy); if b = 1,
    KL(policy || teacher); otherwise b KL(teacher || m) + (1 - b) KL(policy || m) with m = b teacher + (1 - b) policy.

    The distributions have `distill_top_k` + 1 outcomes: the teacher's most likely tokens, and "any other token". The
    divergence is non-negative, and 0 where the two distributions over these outcomes agree. If the policy leaves less than
    1e-6 to "any other token", the loss has no gradient that raises it; this can happen with a `distill_top_k` of 1 or 2.
    A token whose loss is above `distill_max` has that loss and no gradient.

    Without `distill_rest` the sums cover the teacher's most likely tokens alone. They may be below 0 where the policy gives
    these tokens more probability than the teacher; such a token has the loss 0 and no gradient. Log-probs below
    `distill_min_log_prob` count as this number, the policy's without a gradient.
    """
    teacher, policy = inputs.reference_top_log_probs, inputs.top_log_probs
    assert teacher is not None and policy is not None
    return by_rows(policy, teacher, lambda policy, teacher: _token_divergence(teacher, policy, settings)), {
        "actor/distill_mass": policy.detach().exp().sum(1),
        "actor/distill_teacher_mass": teacher.exp().sum(1),
    }


def _token_divergence(teacher: Tensor, policy: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Return the loss of each token [T] from log-probs [T, K]; see `gkd`."""
    outcomes = (with_rest(teacher), with_rest(policy)) if settings.distill_rest else (teacher, policy)
    if (least := settings.distill_min_log_prob) is not None:
        outcomes = (outcomes[0].clamp(min=least), outcomes[1].clamp(min=least))
    loss = divergence(*outcomes, settings.distill_beta)
    if not settings.distill_rest or settings.distill_max is not None:
        loss = loss.clamp(None if settings.distill_rest else 0.0, settings.distill_max)
    return loss


def with_rest(log_probs: Tensor) -> Tensor:
    """Append the log-prob of all other outcomes: [T, K] -> [T, K + 1]."""
    import torch

    rest = (1.0 - log_probs.exp().sum(1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([log_probs, rest.log()], 1)


def divergence(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """Return the divergence [T] of two distributions of n outcomes, given as log-probs [T, n]; see `gkd`."""
    if beta == 0.0:
        return kl_divergence(teacher, policy)
    if beta == 1.0:
        return kl_divergence(policy, teacher)
    middle = (teacher + math.log(beta)).logaddexp(policy + math.log1p(-beta))
    return beta * kl_divergence(teacher, middle) + (1.0 - beta) * kl_divergence(policy, middle)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) [T] of distributions given as log-probs [T, n]."""
    return (p.exp() * (p - q)).sum(1)
