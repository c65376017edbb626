"""Criteria by which a rollout correction rejects tokens and sequences: `algorithm.correction.reject`. Pure functions.

d = log p(trainer) - log p(engine) is a sampled token's log-ratio. A criterion is named SPAN_MEASURE, e.g. ``mean_k3``.
Measures (Schulman, joschu.net/blog/kl-approx): ``ratio`` is exp(d), ``k2`` is d^2 / 2, ``k3`` is exp(d) - d - 1. Spans:
``token`` looks at each token, ``sequence`` at the sum over the sequence (for ``ratio``: the product), ``mean`` at the mean
over the sequence (for ``ratio``: the geometric mean), and ``worst`` at each token, but rejects the whole sequence.
``negative_`` before a criterion restricts it to tokens with a negative advantage (DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megarl.algorithms.inputs import LossInputs, advantages_of
from megarl.algorithms.kl import limited
from megarl.registry import nearest

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.recipe.algorithm import CorrectionConfig

SPANS, MEASURES, NEGATIVE = ("token", "sequence", "mean", "worst"), ("ratio", "k2", "k3"), "negative_"
NAMES = tuple(f"{prefix}{span}_{measure}" for prefix in ("", NEGATIVE) for span in SPANS for measure in MEASURES)


@dataclass(frozen=True)
class Criterion:
    """An interval, ends included, that a measure of the mismatch must stay in."""

    span: str
    measure: str
    low: float  # of `ratio`: its logarithm
    high: float  # of `ratio`: its logarithm
    negative: bool = False  # for tokens with a negative advantage only


def criteria(limits: Mapping[str, Any]) -> list[Criterion]:
    """Return the criteria of `algorithm.correction.reject`. A limit of None switches a criterion off.

    Raises ValueError, without the criterion's name, for an unknown name or a limit of another form.
    """
    return [parse_criterion(name, limit) for name, limit in limits.items() if limit is not None]


def parse_criterion(name: str, limit: Any) -> Criterion:
    """Return the criterion `name` with its limit: [low, high] for a ratio, each a number or None, else the highest value.

    Raises ValueError as `criteria` does.
    """
    if name not in NAMES:
        close = nearest(name.replace("k1", "ratio"), NAMES)  # k1 is -log ratio
        raise ValueError(f"this criterion is unknown{f'; did you mean {close}?' if close else ''}")
    negative = name.startswith(NEGATIVE)
    span, measure = name.removeprefix(NEGATIVE).split("_")
    if measure != "ratio":
        if not _is_number(limit) or limit <= 0:
            raise ValueError(f"the limit of {measure} is a number above 0")
        return Criterion(span, measure, -math.inf, float(limit), negative)
    if not (isinstance(limit, list) and len(limit) == 2 and all(end is None or _is_number(end) for end in limit)):
        raise ValueError("the limits of a ratio are [low, high]; null switches a limit off")
    low, high = 0.0 if limit[0] is None else float(limit[0]), math.inf if limit[1] is None else float(limit[1])
    if not 0 <= low < high:
        raise ValueError(f"no ratio is between {low} and {high}")
    return Criterion(span, measure, math.log(low) if low else -math.inf, math.log(high), negative)


def of_icepop(settings: CorrectionConfig) -> dict[str, Any]:
    """Return the settings that `icepop` stands for: token weights inside an interval of the ratio, and none outside.

    Further criteria of `reject` stay. Raises ValueError if `icepop` is not [low, high] with 0 < low < high.
    """
    limits = settings.icepop
    if limits is None or len(limits) != 2 or not 0 < limits[0] < limits[1] < math.inf:
        raise ValueError("it is not [low, high] with 0 < low < high")
    low, high = limits
    return {"weights": "token", "truncate": high, "reject": {**settings.reject, "token_ratio": [low, high]}}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def accepted(inputs: LossInputs, mismatch: Tensor, limits: Mapping[str, Any]) -> Tensor:
    """Return 1.0 for the loss tokens that no criterion rejects, else 0.0: [T]. mismatch [T]: d, 0 for excluded tokens.

    Sums and means of a sequence are over all of its loss tokens. NaN is outside of any interval.
    """
    inputs = replace(inputs, accepted=None)
    keep = inputs.loss_mask > 0
    for criterion in criteria(limits):
        inside = _inside(criterion, inputs, mismatch)
        keep = keep & (inside | (advantages_of(inputs) >= 0) if criterion.negative else inside)
    return keep.to(mismatch.dtype)


def _inside(criterion: Criterion, inputs: LossInputs, d: Tensor) -> Tensor:
    """Return whether each token is inside the criterion's interval: bool [T]."""
    values = {"ratio": lambda: d, "k2": lambda: 0.5 * d.square(), "k3": lambda: limited(d).expm1() - limited(d)}
    value = values[criterion.measure]()
    if criterion.span == "sequence":
        value = inputs.on_tokens(inputs.sequence_sums(value))
    elif criterion.span == "mean":
        value = inputs.on_tokens(inputs.sequence_means(value))
    inside = (value >= criterion.low) & (value <= criterion.high)
    if criterion.span == "worst":
        inside = inputs.on_tokens(inputs.sequence_sums((~inside).to(d.dtype))) == 0
    return inside
