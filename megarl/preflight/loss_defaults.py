"""Apply the defaults that a loss declares (`@policy_loss(defaults=...)`) to keys that the recipe leaves open."""

from __future__ import annotations

from collections.abc import Container

from megarl.algorithms.catalogue import LOSSES
from megarl.recipe.algorithm import AlgorithmConfig


def apply_loss_defaults(algorithm: AlgorithmConfig, keys: Container[str]) -> None:
    """Set the defaults of `algorithm.loss` that are not among `keys`, the dotted keys that the recipe sets.

    The modules of `algorithm.modules` must be imported. A loss that is not registered has no defaults.
    """
    if algorithm.loss not in LOSSES:
        return
    for name, value in LOSSES[algorithm.loss].defaults.items():
        if f"algorithm.{name}" not in keys:
            setattr(algorithm, name, value)


def loss_notice(algorithm: AlgorithmConfig) -> str | None:
    """Return a notice of the values of settings for which `algorithm.loss` has other defaults; None if it has none."""
    values = []
    for name, default in LOSSES[algorithm.loss].defaults.items():
        value = getattr(algorithm, name)
        values.append(f"{name} {value}" if value == default else f"{name} {value} (default of this loss: {default})")
    return f"algorithm.loss={algorithm.loss} trains with {', '.join(values)}" if values else None
