"""Losses of a training API's data: sums over tokens with vectors that the caller gives, without any normalization.

A datum has N input tokens and N targets: target i is predicted after input i. Every vector of a datum has N entries. The
formulas come from the Tinker API (https://tinker-docs.thinkingmachines.ai/tinker/losses).

>>> loss = checked_loss("ppo", {"clip_low_threshold": 0.9})
>>> loss.inputs
('advantages', 'logprobs')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.errors import pluralize

if TYPE_CHECKING:
    from torch import Tensor

Vectors = Mapping[str, "Tensor"]
Options = Mapping[str, float]


@dataclass(frozen=True)
class DatumLoss:
    """A checked loss. `name`: of the loss. `options`: values of all its options."""

    name: str
    options: dict[str, float]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the vectors that each datum needs, targets excluded, sorted."""
        return DATUM_LOSSES[self.name].inputs

    def __call__(self, log_probs: Tensor, vectors: Vectors, lengths: list[int]) -> Tensor:
        """Return the loss of concatenated data, a scalar.

        log_probs [T]: of the targets, with gradient. vectors: each float32 [T]. lengths: of the data; they sum to T.
        """
        return DATUM_LOSSES[self.name].function(log_probs, vectors, lengths, self.options)


@dataclass(frozen=True)
class LossFormula:
    """A formula with its inputs and options. An option of value None has no default: the caller must set it."""

    function: Callable[[Tensor, Vectors, list[int], Options], Tensor]
    inputs: tuple[str, ...]
    options: dict[str, float | None] = field(default_factory=dict)


def _cross_entropy(log_probs: Tensor, vectors: Vectors, lengths: list[int], options: Options) -> Tensor:
    return -_weighted_sum(log_probs, vectors["weights"])


def _importance_sampling(log_probs: Tensor, vectors: Vectors, lengths: list[int], options: Options) -> Tensor:
    advantages = vectors["advantages"]
    return -(_ratio(log_probs, vectors["logprobs"], advantages) * advantages).sum()


def _ppo(log_probs: Tensor, vectors: Vectors, lengths: list[int], options: Options) -> Tensor:
    advantages = vectors["advantages"]
    return -_clipped(_ratio(log_probs, vectors["logprobs"], advantages), advantages, options).sum()


def _cispo(log_probs: Tensor, vectors: Vectors, lengths: list[int], options: Options) -> Tensor:
    advantages = vectors["advantages"]
    ratio = _ratio(log_probs.detach(), vectors["logprobs"], advantages)
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -_weighted_sum(log_probs, clipped * advantages)


def _dro(log_probs: Tensor, vectors: Vectors, lengths: list[int], options: Options) -> Tensor:
    distance = (log_probs - vectors["logprobs"]) ** 2
    return -(log_probs * vectors["advantages"] - 0.5 * options["beta"] * distance).sum()


def _gspo(log_probs: Tensor, vectors: Vectors, lengths: list[int], options: Options) -> Tensor:
    import torch

    advantages, marked = vectors["advantages"], vectors["sequence_ratio_mask"] != 0
    difference = (log_probs.detach() - vectors["logprobs"]).where(marked, log_probs.new_zeros(()))
    sums = torch.stack([part.sum() for part in difference.split(lengths)])
    counts = torch.stack([part.sum() for part in marked.split(lengths)])
    means = (sums / counts.clamp(min=1)).repeat_interleave(torch.tensor(lengths, device=log_probs.device))
    ratio = (
        means + log_probs - log_probs.detach()
    ).exp()  # the value of the sequence's ratio, each token's own gradient
    return -_clipped(ratio, advantages, options).sum()


def _ratio(log_probs: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    """Return the probability ratio [T]; 1 for tokens without an advantage, where an infinite ratio would give nan."""
    return (log_probs - sampled).where(advantages != 0, log_probs.new_zeros(())).exp()


def _clipped(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    import torch

    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return torch.minimum(ratio * advantages, clipped * advantages)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of `values` times `weights`; values with weight 0 may be infinite."""
    return (values.where(weights != 0, values.new_zeros(())) * weights).sum()


_SAMPLED = ("advantages", "logprobs")

DATUM_LOSSES = {
    "cross_entropy": LossFormula(_cross_entropy, ("weights",)),
    "importance_sampling": LossFormula(_importance_sampling, _SAMPLED),
    "ppo": LossFormula(_ppo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": LossFormula(_cispo, _SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": LossFormula(_dro, _SAMPLED, {"beta": None}),
    "gspo": LossFormula(
        _gspo, (*_SAMPLED, "sequence_ratio_mask"), {"clip_low_threshold": None, "clip_high_threshold": None}
    ),
}
"""Formulas by the name in the API. Options without a documented default have none."""


def checked_loss(name: str, options: Mapping[str, float | str] | None = None) -> DatumLoss:
    """Return the loss `name` with its `options`. Raises ValueError for unknown names and for options that are missing."""
    if name not in DATUM_LOSSES:
        raise ValueError(
            f"loss_fn is {name!r}, which this server does not have; use one of {', '.join(DATUM_LOSSES)}, or "
            "forward_backward_custom, which computes any loss of log-probs in the client"
        )
    formula, settings = DATUM_LOSSES[name], dict(options or {})
    if unknown := sorted(set(settings) - set(formula.options)):
        names = ", ".join(formula.options) or "none"
        raise ValueError(f"loss_fn_config has {', '.join(unknown)}; the options of {name} are: {names}")
    values: dict[str, float] = {}
    for option, default in formula.options.items():
        value = settings.get(option, default)
        if value is None:
            raise ValueError(f"loss_fn {name!r} has no default for {option}: set loss_fn_config={{{option!r}: ...}}")
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config[{option!r}] is {value!r}; it must be a finite number")
        values[option] = float(value)
    if values.get("clip_low_threshold", 0.0) > values.get("clip_high_threshold", math.inf):
        raise ValueError(
            f"clip_low_threshold {values['clip_low_threshold']:g} is above clip_high_threshold "
            f"{values['clip_high_threshold']:g}; they are bounds of the probability ratio, as 0.8 and 1.2"
        )
    return DatumLoss(name, values)


def check_inputs(loss: DatumLoss, entries: Mapping[str, int], length: int, where: str) -> None:
    """Raise ValueError unless a datum has the vectors that `loss` needs, and no others.

    entries: number of entries of each vector, by its name. length: of the datum's targets. where: the datum, for messages.
    """
    missing, unknown = sorted(set(loss.inputs) - set(entries)), sorted(set(entries) - set(loss.inputs))
    if missing or unknown:
        needed = ", ".join(("target_tokens", *loss.inputs))
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
        raise ValueError(f"{where}: loss_fn_inputs {problem}; {loss.name} takes {needed}")
    for name, count in entries.items():
        if count != length:
            raise ValueError(
                f"{where}: {name} has {pluralize(count, 'entry', 'entries')} and target_tokens has {length}; both need one per "
                "token of model_input"
            )
