"""megarl: reinforcement learning of large language models on Megatron.

>>> from megarl import load_recipe, train
>>> train(load_recipe("recipes/quickstart.yaml", ["train.steps=2"]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from megarl.preflight.load import load_recipe
    from megarl.recipe import Recipe, RecipeError

__version__ = "0.1.0"
__all__ = ["Recipe", "RecipeError", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on first use, so that a command interrupted during start-up can say so."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megarl import recipe
    from megarl.preflight import load

    return getattr(load if name == "load_recipe" else recipe, name)


def train(recipe: Recipe) -> Path:
    """Train as `recipe` says and return the run's directory. See `megarl.assembly.train`."""
    from megarl.assembly import train as run_training

    return run_training(recipe)
