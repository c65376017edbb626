"""Refuse weights that are not finite, or larger than any model's: no engine, checkpoint or export receives them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

LARGEST_WEIGHT = 1e6
"""Weights of published models stay below a few thousand."""


class BrokenWeights(RuntimeError):
    """Weights are NaN, infinite or beyond `LARGEST_WEIGHT`."""


def check_weights(chunks: Iterable[Any], event: str) -> None:
    """Raise BrokenWeights if a parameter on this rank is not finite or has an element beyond `LARGEST_WEIGHT`.

    chunks: modules, of which all parameters are read once. event: what the weights are needed for, which ends the message.
    """
    named = [item for chunk in chunks for item in chunk.named_parameters() if item[1].numel()]
    if not named:
        return
    with torch.no_grad():
        extremes = torch.stack([torch.stack([weight.amax(), -weight.amin()]).float().amax() for _, weight in named])
    broken = [
        (name, largest)
        for (name, _), largest in zip(named, extremes.tolist(), strict=True)
        if not (math.isfinite(largest) and largest <= LARGEST_WEIGHT)
    ]
    if not broken:
        return
    name, largest = broken[0]
    value = "NaN" if math.isnan(largest) else f"{largest:.3g}"
    raise BrokenWeights(
        f"{len(broken)} of {len(named)} parameters of this rank are broken (the first is {name}; its largest absolute value is "
        f"{value}; the limit is {LARGEST_WEIGHT:g}): {event}"
    )
