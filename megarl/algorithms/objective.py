"""The scalar loss of a micro batch: policy loss, rollout correction, KL and entropy, with metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.algorithms.catalogue import ADVANTAGES, KL_ESTIMATORS, LOSSES
from megarl.algorithms.correction import accepted_tokens, corrections, corrects, rejects
from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.kl import limited, mse

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import AlgorithmConfig


def runs_old_log_prob_pass(settings: AlgorithmConfig) -> bool:
    """Return whether a forward pass before the updates computes the proximal policy's log-probs."""
    return reads_old_log_probs(settings) and settings.old_log_probs == "computed"


def reads_old_log_probs(settings: AlgorithmConfig) -> bool:
    """Return whether loss, KL or advantages read the proximal policy's log-probs."""
    reads = LOSSES[settings.loss].needs_old_log_probs or settings.kl_in_reward
    return reads or ADVANTAGES[settings.advantage].of_positions is not None


def needs_reference(settings: AlgorithmConfig) -> bool:
    """Return whether a loss term compares the policy with the reference policy."""
    return settings.kl_coef > 0 or LOSSES[settings.loss].needs_reference


def runs_reference_pass(settings: AlgorithmConfig) -> bool:
    """Return whether trainers keep the initial policy and compute its log-probs; a teacher's come with the samples."""
    return needs_reference(settings) and settings.reference == "start"


def needs_teacher(settings: AlgorithmConfig) -> bool:
    """Return whether teacher engines score the samples."""
    return needs_reference(settings) and settings.reference == "teacher"


def teacher_top_k(settings: AlgorithmConfig) -> int:
    """Return how many of its most likely tokens a teacher reports per position; 0: only the sampled token's log-prob."""
    return settings.distill_top_k if LOSSES[settings.loss].needs_top else 0


def with_proximal_policy(inputs: LossInputs, settings: AlgorithmConfig) -> LossInputs:
    """Set `old_log_probs` if no pass computed them: the current policy's or the engine's."""
    if settings.old_log_probs == "current":
        return replace(inputs, old_log_probs=inputs.log_probs.detach())
    if settings.old_log_probs == "rollout":
        return replace(inputs, old_log_probs=inputs.rollout_log_probs)
    return inputs


def trainers_policy(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """Return the trainer's log-probs [T] to compare with the engine's: the proximal policy's if computed, else current."""
    if runs_old_log_prob_pass(settings):
        assert inputs.old_log_probs is not None
        return inputs.old_log_probs
    return inputs.log_probs.detach()


def without_rejected(inputs: LossInputs, settings: AlgorithmConfig) -> LossInputs:
    """Return inputs in which the tokens that the rollout correction rejects get no gradient: see `LossInputs.accepting`."""
    if not rejects(settings.correction):
        return inputs
    return inputs.accepting(accepted_tokens(inputs, trainers_policy(inputs, settings), settings.correction))


def objective(
    inputs: LossInputs, settings: AlgorithmConfig, *, correction_scale: float = 1.0, kl_weight: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one micro batch's contribution to the mini batch's loss (scalar), and to each metric.

    Both are already normalized over the whole mini batch (through `loss_weights` and `token_share`): summed over micro
    batches and over data- and context-parallel ranks they give the mini batch's loss and the metrics' means over its
    loss tokens. `correction_scale`: see `correction.corrections`. `kl_weight`: of the KL loss; None: `kl_coef`.
    """
    inputs = with_proximal_policy(inputs, settings)
    # Sums skip excluded tokens. Gradients must not see them either: in the backward pass 0 x nan is nan.
    inputs = replace(inputs, log_probs=inputs.zero_excluded(inputs.log_probs))
    if inputs.top_log_probs is not None and inputs.reference_top_log_probs is not None:
        where = inputs.loss_mask[:, None] > 0
        tops = (
            values.where(where, values.new_zeros(()))
            for values in (inputs.top_log_probs, inputs.reference_top_log_probs)
        )
        inputs = replace(inputs, **dict(zip(("top_log_probs", "reference_top_log_probs"), tops, strict=True)))
    inputs = without_rejected(inputs, settings)
    token_loss, token_metrics = LOSSES[settings.loss].function(inputs, settings)
    if corrects(settings.correction):
        weights, more = corrections(inputs, trainers_policy(inputs, settings), settings.correction, correction_scale)
        token_loss = token_loss * weights
        token_metrics = {**token_metrics, **more}

    loss = inputs.total(token_loss, inputs.loss_weights)
    metrics = {name: inputs.total(values, inputs.token_share) for name, values in token_metrics.items()}
    metrics["actor/pg_loss"] = loss.detach()
    if inputs.entropy is not None:
        metrics["actor/entropy"] = inputs.total(inputs.entropy.detach(), inputs.token_share)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * inputs.total(inputs.entropy, inputs.loss_weights)
    if settings.kl_coef and not settings.kl_in_reward:
        token_kl = kl_to_reference(inputs, settings)
        kl = inputs.total(token_kl, inputs.loss_weights)
        metrics["actor/kl_loss"] = kl.detach()
        metrics["actor/kl"] = inputs.total(token_kl.detach(), inputs.token_share)
        loss = loss + (settings.kl_coef if kl_weight is None else kl_weight) * kl
    metrics["actor/loss"] = loss.detach()
    return loss, metrics


def held_out_metrics(inputs: LossInputs, settings: AlgorithmConfig) -> dict[str, Tensor]:
    """Return one micro batch's contribution to the metrics of a held-out evaluation: the loss, without KL and entropy,
    and the loss's metrics. As in `objective`, the sum over all micro batches of all ranks is the metric.

    Nothing updates the policy here, so the current policy is also the proximal policy.
    """
    inputs = replace(inputs, old_log_probs=inputs.log_probs)
    token_loss, token_metrics = LOSSES[settings.loss].function(inputs, settings)
    metrics = {}
    for name, values in token_metrics.items():
        metric = name.removeprefix("actor/")
        metrics[f"eval/{metric}"] = inputs.total(values, inputs.token_share)
    return {**metrics, "eval/loss": inputs.total(token_loss, inputs.loss_weights)}


def kl_to_reference(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """Return the KL loss of each token [T]; with `kl_straight_through`, its value with the gradient of k2; with
    `kl_importance`, weighted by p(current) / p(engine)."""
    assert inputs.reference_log_probs is not None
    value = KL_ESTIMATORS[settings.kl_estimator](inputs.log_probs, inputs.reference_log_probs)
    if settings.kl_straight_through:
        k2 = mse(inputs.log_probs, inputs.reference_log_probs)
        value = value.detach() + k2 - k2.detach()
    if settings.kl_importance:
        assert inputs.rollout_log_probs is not None
        value = value * limited(inputs.log_probs - inputs.rollout_log_probs).exp()
    return value
