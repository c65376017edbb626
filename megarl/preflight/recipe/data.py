"""Checks of the section `data`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megarl.errors import RecipeError

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe
from megarl.recipe.data import files_of


def check_data(recipe: Recipe) -> None:
    """Raise RecipeError for files that cannot be read, and for a mix or an order that cannot be had."""
    data = recipe.data
    if data.mix and data.train_files:
        what = "data.mix names the training sets, so these files would be read by nothing"
        raise RecipeError("data.train_files", what, "make them a set of data.mix", value=data.train_files)
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        what = f"it is above data.max_pixels={data.max_pixels}"
        raise RecipeError("data.min_pixels", what, "set it to no more than that", value=data.min_pixels)
    if data.curriculum_epochs is not None and data.curriculum is None:
        what = "there is no order of which these would be the epochs"
        raise RecipeError(
            "data.curriculum_epochs", what, "set data.curriculum, or leave it out", value=data.curriculum_epochs
        )
    for name, part in data.mix.items():
        if not re.fullmatch(r"[\w.-]+", name):
            remedy = "use letters, digits, _, - and ."
            raise RecipeError("data.mix", f"the name {name!r} is part of metrics' names", remedy, value=name)
        if not part.files:
            raise RecipeError("data.mix", f"the set {name} has no files", "name .parquet or .jsonl files", value=name)
        if not 0 < part.weight < float("inf"):
            remedy = "give a number above 0, or leave the set out"
            raise RecipeError("data.mix", f"the weight of {name} is not above 0", remedy, value=part.weight)
    for name, file in files_of(data):
        if not file.endswith((".parquet", ".jsonl")):
            what = f"{file} is neither .parquet nor .jsonl"
            raise RecipeError(name, what, "write its rows to one of these, as docs/data.md shows", value=file)
