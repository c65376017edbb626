"""Data sets of the tiny copy: a few rows with the recipe's columns, and data sources that its scorers support."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.commands.data import deepscaler, geo3k, gsm8k, math, retool_sft, word_problems
from megarl.commands.data.tiny_rows import Layout, write_tiny_rows
from megarl.commands.rehearse.changes import Changes
from megarl.commands.rehearse.scorer import NAME as COIN
from megarl.data.rows import iterate_rows
from megarl.errors import RecipeError
from megarl.hf import hub
from megarl.recipe.data import files_of
from megarl.recipe.schema import Recipe, RewardConfig
from megarl.rewards import resolve

_COUNT = 8
_GENERATED = "a few generated rows in its columns"


@dataclass(frozen=True)
class Columns:
    """Layout and data source of the rows of a file."""

    layout: Layout
    data_source: str


# Folders that `megarl data` writes, by the names in the docs. Used if the files are missing.
_FOLDERS = {
    "gsm8k": Columns("problems", gsm8k.DATA_SOURCE),
    "math": Columns("problems", math.DATA_SOURCE),
    "dapo": Columns("problems", "math_dapo"),
    "aime": Columns("problems", "aime"),
    "deepscaler": Columns("problems", deepscaler.DATA_SOURCE),
    "geo3k": Columns("pictures", geo3k.DATA_SOURCE),
    "retool": Columns("conversations", retool_sft.DATA_SOURCE),
    "data": Columns("problems", word_problems.DATA_SOURCE),  # the quickstart's
}
_BY_COLUMN: dict[str, Layout] = {"videos": "films", "images": "pictures", "chosen": "pairs", "messages": "conversations", "response": "answers", "prompt": "problems"}  # fmt: skip


def write_data(recipe: Recipe, small: Recipe, folder: Path, changes: Changes) -> None:
    """Write tiny data sets below `folder`, set their paths in `small`, and add a scorer with varying scores."""
    number = itertools.count()

    def write(key: str, files: Sequence[str]) -> list[str]:
        return [_write(columns_of(recipe, key, file), file, folder, next(number)) for file in files]

    data = small.data
    training = [(key, file) for key, file in files_of(recipe.data) if key != "data.eval_files"]
    sources = {columns_of(recipe, key, file).data_source for key, file in training}
    changes.set(data, "data.train_files", write("data.train_files", data.train_files), _GENERATED)
    changes.set(data, "data.eval_files", write("data.eval_files", data.eval_files), _GENERATED)
    for name, part in data.mix.items():
        key = f"data.mix.{name}.files"
        changes.set(part, key, write(key, part.files), _GENERATED)
    changes.set(data, "data.columns", {}, _GENERATED)
    if recipe.train.source == "rollout":
        _add_coin(small.reward, sources, changes)


def _of_source(data_source: str) -> Columns | None:
    """Return the columns of a published data set by its data source, the name on the hub."""
    return next((columns for columns in _FOLDERS.values() if columns.data_source == data_source), None)


def columns_of(recipe: Recipe, key: str, file: str) -> Columns:
    """Determine the columns of a `file` in the setting `key`: from its first row, or from its folder's name if missing.

    Raises RecipeError if neither determines them, or if the first row is empty.
    """
    path = Path(file)
    if path.is_file():
        row = next(iterate_rows(path, ("prompt",), ("messages",), ("chosen", "rejected"), optional=("data_source", "images", "videos", "response"), names=recipe.data.columns), None)  # fmt: skip
        if row is not None:
            layout = next((layout for column, layout in _BY_COLUMN.items() if row.values.get(column)), None)
            if layout is None:
                raise RecipeError(
                    key, f"the first row of {file} has an empty prompt", "fill or delete this row", value=file
                )
            return Columns(layout, row.get("data_source", str) or path.parent.name)
    on_hub = hub.data_name(file)
    by_folder = _of_source(on_hub.repo) if on_hub is not None else _FOLDERS.get(path.parent.name)
    source = by_folder.data_source if by_folder else path.parent.name if on_hub is None else on_hub.repo
    if recipe.train.source == "preferences":
        return Columns("pairs", source)
    if recipe.train.source == "sft":
        return Columns("conversations" if by_folder and by_folder.layout == "conversations" else "answers", source)
    if by_folder and by_folder.layout in ("problems", "pictures"):
        return by_folder
    if recipe.reward.function or recipe.reward.functions:
        return Columns("problems", source)
    raise RecipeError(
        key,
        f"{file} does not exist, and its folder's name does not determine a scorer",
        f"set reward.function, name an existing file, or name a file in a folder called {', '.join(_FOLDERS)}",
        value=file,
    )


def _write(columns: Columns, file: str, folder: Path, number: int) -> str:
    path = folder / f"{number}_{Path(file).stem}.parquet"
    return str(write_tiny_rows(path, columns.layout, columns.data_source, _COUNT, number))


def _add_coin(reward: RewardConfig, sources: set[str], changes: Changes) -> None:
    """Add the coin as the first of the recipe's scorers, since the first one determines the accuracy."""
    scorers = dict(reward.functions) or dict.fromkeys(
        [reward.function] if reward.function else sorted({scorer.name for scorer in resolve(None, sources).values()}),
        1.0,
    )
    reason = "a coin is added because a random model's answers are all wrong; evaluation uses the same scorers"
    reward.function, reward.functions = None, {COIN: 1.0, **scorers}
    names = ", ".join(scorers)
    changes.note("reduced", "reward", names, f"coin, {names}", reason)
