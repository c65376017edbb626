"""Rollout correction: importance weights for the mismatch of engine and trainer log-probs, and its metrics, also by lag. Pure.

rho = p(trainer) / p(engine) of a sampled token; `objective.trainers_policy` defines the trainer's policy. Log-ratios are
clamped to +-20 before exp. Sources: truncated importance sampling (fengyao.notion.site/off-policy-rl), masked importance
sampling (yingru.notion.site/When-Speed-Kills-Stability), IcePop (arXiv 2510.18855).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.inputs import LossInputs, kept
from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.rejection import accepted

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import CorrectionConfig


def corrects(settings: CorrectionConfig) -> bool:
    """Return whether any correction is on."""
    return settings.weights != "none" or rejects(settings)


def rejects(settings: CorrectionConfig) -> bool:
    """Return whether a correction may leave tokens out of the loss."""
    return any(limit is not None for limit in settings.reject.values())


def log_mismatch(inputs: LossInputs, policy: Tensor) -> Tensor:
    """Return log rho [T] for the trainer's log-probs `policy` [T]; 0 for excluded tokens. Carries no gradient."""
    assert inputs.rollout_log_probs is not None
    return inputs.zero_excluded(policy.detach() - inputs.rollout_log_probs)


def ratios(inputs: LossInputs, mismatch: Tensor, level: str) -> Tensor:
    """Return rho of each token [T], of its `sequence` (the product over tokens), or their `geometric` mean."""
    if level == "sequence":
        mismatch = inputs.on_tokens(inputs.sequence_sums(mismatch))
    elif level == "geometric":
        mismatch = inputs.on_tokens(inputs.sequence_means(mismatch))
    return mismatch.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def corrections(
    inputs: LossInputs, policy: Tensor, settings: CorrectionConfig, scale: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the factor of each token's loss [T], and per-token metrics as a loss returns them.

    With `normalize`, `scale` makes the mean weight of the mini batch's accepted tokens 1: see `correction_scales`. Otherwise
    it is 1. A sequence's weight is over all of its loss tokens, rejected ones included (as verl's).
    """
    mismatch = log_mismatch(inputs, policy)
    weights, metrics = mismatch.new_ones(mismatch.shape), {}
    if settings.weights != "none":
        ratio = ratios(replace(inputs, accepted=None), mismatch, settings.weights)
        weights = ratio.clamp(max=settings.truncate) * scale
        metrics["rollout/correction_weight"] = weights
        metrics["rollout/correction_truncated"] = (ratio > settings.truncate).to(ratio.dtype)
    if rejects(settings):
        accepted = accepted_tokens(inputs, policy, settings)
        weights = kept(weights, accepted)
        metrics["rollout/correction_masked"] = 1.0 - accepted
    return weights, metrics


def accepted_tokens(inputs: LossInputs, policy: Tensor, settings: CorrectionConfig) -> Tensor:
    """Return 1.0 for the tokens of `loss_mask` that no criterion rejects, else 0.0: [T]. policy [T]: the trainer's log-probs."""
    return accepted(inputs, log_mismatch(inputs, policy), settings.reject)


def weight_totals(inputs: LossInputs, policy: Tensor, settings: CorrectionConfig) -> np.ndarray:
    """Return sum and number [2] of the truncated weights of one micro batch: per accepted token or, unless `weights` is
    "token", per sequence with an accepted token. Summed over a mini batch, their quotient is the mean that `normalize`
    divides by."""
    inputs = replace(inputs, accepted=None)
    weights = ratios(inputs, log_mismatch(inputs, policy), settings.weights).clamp(max=settings.truncate)
    if rejects(settings):
        inputs = inputs.accepting(accepted_tokens(inputs, policy, settings))
    count = inputs.counted
    if settings.weights == "token":
        weights = kept(weights, count)
    else:
        weights, count = inputs.sequence_means(weights), (inputs.sequence_sums(count) > 0).to(weights.dtype)
    return np.array([weights.double().sum().item(), count.double().sum().item()])


@dataclass(frozen=True)
class Mismatch:
    """Sums over the loss tokens of a batch or a part of it, with d = log rho; parts add up."""

    tokens: float = 0.0
    sequences: float = 0.0
    k1: float = 0.0  # of -d
    absolute: float = 0.0  # of |d|
    k3: float = 0.0  # of exp(d) - d - 1
    ratio: float = 0.0  # of rho
    square: float = 0.0  # of rho^2
    sequence_square: float = 0.0  # of the square of the product of a sequence's rho
    largest: float = 0.0  # of |d|
    # By version of the weights that sampled the tokens: their number, and the sum of |d|. Empty: not measured.
    by_version: dict[int, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: LossInputs, policy: Tensor) -> Mismatch:
        """Measure one micro batch with the trainer's log-probs `policy` [T], in float64."""
        tokens = inputs.loss_mask.double().sum().item()
        if not tokens:
            return cls()
        d = log_mismatch(inputs, policy).double()
        token, sequence = (ratios(inputs, d, level) for level in ("token", "sequence"))
        means = inputs.sequence_means(sequence)  # 0 for a sequence without loss tokens

        def total(values: Tensor) -> float:
            return float(inputs.zero_excluded(values).sum().item())

        return cls(
            tokens=tokens,
            sequences=float((inputs.sequence_sums(inputs.loss_mask) > 0).sum().item()),
            k1=-total(d),
            absolute=total(d.abs()),
            k3=total(d.expm1() - d),
            ratio=total(token),
            square=total(token.square()),
            sequence_square=float(means.square().sum().item()),
            largest=float(d.abs().max().item()),
            by_version=_by_version(inputs, d.abs()),
        )

    def __add__(self, other: Mismatch) -> Mismatch:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        largest = float(np.maximum(self.largest, other.largest))  # keeps a NaN
        versions = dict(self.by_version)
        for version, (tokens, absolute) in other.by_version.items():
            before = versions.get(version, (0.0, 0.0))
            versions[version] = (before[0] + tokens, before[1] + absolute)
        return Mismatch(**sums, largest=largest, by_version=versions)

    def metrics(self, version: int) -> dict[str, float]:
        """Return the mismatch metrics of a step that starts with the weights of `version`; {} without tokens."""
        if not self.tokens:
            return {}
        return {
            "rollout/logprob_gap_mean": self.absolute / self.tokens,
            "rollout/logprob_gap_max": self.largest,
            "rollout/logprob_gap_k1": self.k1 / self.tokens,
            "rollout/logprob_gap_k3": self.k3 / self.tokens,
            "rollout/mismatch_chi2_token": self.square / self.tokens - 1.0,
            "rollout/mismatch_chi2_sequence": self.sequence_square / self.sequences - 1.0,
            "rollout/mismatch_ess": self.ratio**2 / (self.tokens * self.square),
            **{
                f"rollout/logprob_gap_by_lag/{lag}": absolute / tokens
                for lag, (tokens, absolute) in sorted((version - key, sums) for key, sums in self.by_version.items())
            },
        }


_SUMS = tuple(each.name for each in fields(Mismatch) if each.name not in ("largest", "by_version"))


def _by_version(inputs: LossInputs, gaps: Tensor) -> dict[int, tuple[float, float]]:
    """Return, by version of the weights that sampled the loss tokens, their number and the sum of their `gaps` [T]."""
    if inputs.versions is None:
        return {}
    loss, sums = inputs.loss_mask > 0, {}
    for version in inputs.versions[loss].unique().tolist():
        chosen = gaps[loss & (inputs.versions == version)]
        sums[int(version)] = (float(chosen.numel()), float(chosen.sum().item()))
    return sums


def total_mismatch(parts: Iterable[Mismatch | None]) -> Mismatch:
    """Sum over all ranks that report a mismatch."""

    return sum((part for part in parts if part is not None), Mismatch())


def correction_scales(totals: Iterable[np.ndarray | None]) -> list[float]:
    """Return, per mini batch, the factor that makes the mean correction weight 1.

    totals: sums and numbers of the weights [mini batches, 2] of each rank that reports.
    """
    sums = np.sum([part for part in totals if part is not None], axis=0)
    return [float(number / total) if total else 1.0 for total, number in sums]
