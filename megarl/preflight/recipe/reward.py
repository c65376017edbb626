"""What is refused of the recipe's section `reward`. Names of scorers are checked with the data, in megarl/preflight/run.py."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.errors import RecipeError
from megarl.recipe.remote import check_remote

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe


def check_reward(recipe: Recipe) -> None:
    """Raise RecipeError for the first thing that cannot be had as asked."""
    reward = recipe.reward
    check_remote(recipe)
    if not reward.functions:
        return
    if reward.function is not None:
        raise RecipeError(
            "reward.functions",
            f"reward.function names a scorer for every row, too ('{reward.function}')",
            "set one of the two",
            value=dict(reward.functions),
        )
    labels: dict[str, str] = {}
    for name, weight in reward.functions.items():
        if not math.isfinite(weight) or weight == 0:
            remedy = "give a number other than 0, or leave the scorer out"
            raise RecipeError(f"reward.functions.{name}", "this is no weight", remedy, value=weight)
        label = name.rpartition(":")[2]
        if label in labels or label in ("accuracy", "steps"):
            other = f"'{labels[label]}' has" if label in labels else "a part of the sum itself has"
            raise RecipeError(
                "reward.functions",
                f"metrics call '{name}' '{label}', a name that {other} already",
                "give the function another name",
                value=dict(reward.functions),
            )
        labels[label] = name
