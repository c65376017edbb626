"""All algorithm registries with their entries: look names up through this module, which imports every file with entries.

A new file of losses, advantages or aggregations must be named here; entries of a user come from `algorithm.modules`.
"""

from __future__ import annotations

from megarl.algorithms import optimal_baseline, process_advantages, token_advantages  # noqa: F401 - they register
from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.losses import (  # noqa: F401 - they register
    covariance,
    distillation_losses,
    preference_losses,
    second_moment,
    sequence_losses,
    squared_losses,
    token_losses,
)
from megarl.algorithms.losses.registry import LOSSES
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.registry import import_user_module

__all__ = ["ADVANTAGES", "AGGREGATIONS", "KL_ESTIMATORS", "LOSSES", "import_modules"]


def import_modules(settings: AlgorithmConfig) -> None:
    """Import the user's modules, which register entries on import. Raises whatever an import raises."""
    for module in settings.modules:
        import_user_module(module)
