"""A recipe for tests of logs."""

from __future__ import annotations

from typing import Any

from megarl.recipe.schema import Recipe


def make_recipe(**observe: Any) -> Recipe:
    """Return a recipe with plain console, without report and TensorBoard. `observe`: settings of that section."""
    recipe = Recipe()
    recipe.observe.console = "plain"
    recipe.observe.report = False
    recipe.observe.tensorboard = False
    for name, value in observe.items():
        setattr(recipe.observe, name, value)
    return recipe
