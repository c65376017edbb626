"""Checks of the section `data`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.hf import hub
from megarl.recipe.data import DataConfig, files_of
from megarl.registry import did_you_mean

COLUMNS = {
    "rollout": ("prompt", "data_source", "reward_model", "ground_truth", "extra_info", "images", "videos"),
    "sft": ("messages", "prompt", "response", "tools", "data_source", "extra_info"),
    "preferences": ("prompt", "chosen", "rejected", "data_source", "extra_info"),
}
"""Columns that a run reads, by train.source."""

_SPLIT = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w-]+){1,2}")  # OWNER/NAME/[CONFIG/]SPLIT


def column_errors(source: str, columns: dict[str, str]) -> Iterator[RecipeError]:
    """Check `data.columns` of a run with train.source `source`."""
    for name, column in columns.items():
        key = f"data.columns.{name}"
        if name not in COLUMNS[source]:
            problem = f"train.source={source} reads no column {name!r}{did_you_mean(name, COLUMNS[source])}"
            yield RecipeError(key, problem, f"use one of {', '.join(COLUMNS[source])}", value=column)
        elif not isinstance(column, str) or not all(column.split(".")):
            yield RecipeError(key, "it is not a column, nor a column.field", "give the file's name of it", value=column)
    if {"reward_model", "ground_truth"} <= columns.keys():
        problem = "data.columns.reward_model already names the column with the ground truth"
        yield RecipeError("data.columns.ground_truth", problem, "leave one out", value=columns["ground_truth"])


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
    for name, file in files_of(data):
        if file.startswith(hub.PREFIX):
            yield from _hub_name_errors(name, file)
        elif (wrong := path_problem(file)) is not None:
            yield RecipeError(name, *wrong, value=file)
        elif not file.endswith((".parquet", ".jsonl")):
            problem = f"{file} is neither .parquet nor .jsonl"
            remedy = "convert it to one of these, as docs/data.md shows"
            if not os.path.exists(file) and _SPLIT.fullmatch(file):
                remedy += f"; for rows on the hub write hf://{file}"
            yield RecipeError(name, problem, remedy, value=file)


def path_problem(file: str) -> tuple[str, str] | None:
    """Return (problem, remedy) for a path that names no single file; None for others, which need not exist."""
    if file.startswith("~"):
        return "~ is not expanded", f"write {os.path.expanduser(file)}"
    if os.path.isdir(file):
        return "this is a folder", "list its files"
    if {*"*?["} & {*file} and not os.path.exists(file):
        return "patterns are not expanded", "list the files"
    return None


def _hub_name_errors(setting: str, file: str) -> Iterator[RecipeError]:
    try:
        hub.data_name(file)
    except hub.HubError as error:
        yield RecipeError(setting, error.problem, error.remedy, value=file)
