"""Checks of the section `data`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.data import DataConfig, files_of


def data_errors(data: DataConfig) -> Iterator[RecipeError]:
    if data.mix and data.train_files:
        problem = "data.mix names the training sets, so these files would be ignored"
        yield RecipeError("data.train_files", problem, "make them a set of data.mix", value=data.train_files)
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        problem = f"it is above data.max_pixels={data.max_pixels}"
        yield RecipeError("data.min_pixels", problem, f"set it to at most {data.max_pixels}", value=data.min_pixels)
    if data.curriculum_epochs is not None and data.curriculum is None:
        problem, remedy = "data.curriculum is unset, so rows have no order", "set data.curriculum, or leave it out"
        yield RecipeError("data.curriculum_epochs", problem, remedy, value=data.curriculum_epochs)
    for name, part in data.mix.items():
        if not re.fullmatch(r"[\w.-]+", name):
            remedy = "use letters, digits, _, - and ."
            yield RecipeError("data.mix", f"the name {name!r} cannot be part of a metric name", remedy, value=name)
        if not part.files:
            yield RecipeError("data.mix", f"the set {name} has no files", "name .parquet or .jsonl files", value=name)
        if not 0 < part.weight < float("inf"):
            remedy = "give a finite number above 0, or leave the set out"
            yield RecipeError("data.mix", f"the weight of {name} must be finite and above 0", remedy, value=part.weight)
    for name, file in files_of(data):
        if not file.endswith((".parquet", ".jsonl")):
            problem = f"{file} is neither .parquet nor .jsonl"
            yield RecipeError(name, problem, "convert it to one of these, as docs/data.md shows", value=file)
