"""Load a recipe and check it, naming the file that set a wrong value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.errors import RecipeError
from megarl.preflight.recipe.general import validate
from megarl.recipe.load import read_recipe
from megarl.recipe.schema import Recipe


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, check: bool = True) -> Recipe:
    """Read the recipe at `path`, apply dotted `overrides` ("rollout.temperature=0.7") and validate it.

    Raises RecipeError for a missing file, YAML that does not parse, an unknown key, a wrong type or
    (with `check`) a combination that cannot work.
    """
    recipe, origins = read_recipe(path, overrides)
    if check:
        try:
            validate(recipe)
        except RecipeError as error:
            error.origin = origins.get(error.key, f"{path} (default value)")
            raise
    return recipe
