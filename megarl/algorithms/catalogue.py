"""Every registry, filled: whoever looks a recipe's word up imports it from here.

A module of this package that registers something is imported below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms import (  # noqa: F401 - they register
    covariance,
    distillation_losses,
    preference_losses,
    process_advantages,
    sequence_losses,
    token_advantages,
)
from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.losses import LOSSES
from megarl.registry import import_own

if TYPE_CHECKING:
    from megarl.recipe.algorithm import AlgorithmConfig

__all__ = ["ADVANTAGES", "AGGREGATIONS", "KL_ESTIMATORS", "LOSSES", "import_modules"]


def import_modules(settings: AlgorithmConfig) -> None:
    """Import the user's own modules, whose functions then stand in the registries. Raises what importing raises."""
    for module in settings.modules:
        import_own(module)
