"""The number of steps of a run with `train.epochs`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from megarl.errors import RecipeError, pluralize
from megarl.recipe.schema import Recipe


def with_steps(recipe: Recipe, rows_of_sets: Mapping[str, int]) -> tuple[Recipe, list[str]]:
    """Return the recipe with `train.steps` instead of `train.epochs`, and a notice; unchanged if its length is set in steps.

    `rows_of_sets`: number of training rows of each set. Steps are rounded up, so every row is drawn in each epoch.
    """
    epochs = recipe.train.epochs
    if epochs is None:
        return recipe, []
    (rows,) = rows_of_sets.values()  # `epochs_errors` refuses several sets
    each = recipe.data.prompts_per_step
    steps = math.ceil(Fraction(str(epochs)) * rows / each)  # 1.1 as written, not the nearest float
    notice = (
        f"train.epochs = {epochs:g}: {pluralize(rows, 'row')} with data.prompts_per_step = {each:,} are "
        f"{pluralize(steps, 'step')}"
    )
    return replace(recipe, train=replace(recipe.train, steps=steps, epochs=None)), [notice]


def epochs_errors(recipe: Recipe) -> list[RecipeError]:
    """Return an error if `train.epochs` is set and the data is several sets, each of which has separate epochs."""
    if recipe.train.epochs is None or len(recipe.data.mix) < 2:
        return []
    problem = "each set of data.mix has separate epochs, so the run has no number of them"
    return [RecipeError("train.epochs", problem, "set train.steps instead", value=recipe.train.epochs)]
