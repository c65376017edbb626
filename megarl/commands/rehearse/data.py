"""The twin's data sets: a few rows in the columns of the recipe's, of the data sources that its scorers know."""

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
from megarl.recipe.data import files_of
from megarl.recipe.schema import Recipe
from megarl.rewards import resolve

_COUNT = 8
_GENERATED = "a few generated rows in its columns"


@dataclass(frozen=True)
class Columns:
    """What rows of a file are: their layout, and their data source."""

    layout: Layout
    data_source: str


# Of the folders that `megarl data` writes, and docs name; where their files are not there.
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
_BY_COLUMN: dict[str, Layout] = {"images": "pictures", "chosen": "pairs", "messages": "conversations", "response": "answers", "prompt": "problems"}  # fmt: skip


def write_data(recipe: Recipe, twin: Recipe, folder: Path, changes: Changes) -> None:
    """Write the twin's rows below `folder`, name them in it, and see that its scorers tell samples apart."""
    number = itertools.count()

    def tiny(key: str, files: Sequence[str]) -> list[str]:
        return [_write(columns_of(recipe, key, file), file, folder, next(number)) for file in files]

    data = twin.data
    learned = [named for named in files_of(recipe.data) if named[0] != "data.eval_files"]
    sources = {columns_of(recipe, key, file).data_source for key, file in learned}
    changes.set(data, "data.train_files", tiny("data.train_files", data.train_files), _GENERATED)
    changes.set(data, "data.eval_files", tiny("data.eval_files", data.eval_files), _GENERATED)
    for name, part in data.mix.items():
        key = f"data.mix.{name}.files"
        changes.set(part, key, tiny(key, part.files), _GENERATED)
    if recipe.train.source == "rollout":
        _score(twin, sources, changes)


def columns_of(recipe: Recipe, key: str, file: str) -> Columns:
    """What the rows are of a `file` that the setting `key` names: as its first one says, or, where it is not there, as its
    folder's name does.

    Raises RecipeError where neither says it."""
    path = Path(file)
    if path.is_file():
        row = next(iterate_rows(path, ("prompt",), ("messages",), ("chosen", "rejected"), optional=("data_source", "images", "response")), None)  # fmt: skip
        if row is not None:
            layout = next(layout for column, layout in _BY_COLUMN.items() if row.values.get(column))
            return Columns(layout, row.get("data_source", str) or path.parent.name)
    known = _FOLDERS.get(path.parent.name)
    source = known.data_source if known else path.parent.name
    if recipe.train.source == "preferences":
        return Columns("pairs", source)
    if recipe.train.source == "sft":
        return Columns("conversations" if known and known.layout == "conversations" else "answers", source)
    if known and known.layout in ("problems", "pictures"):
        return known
    if recipe.reward.function or recipe.reward.functions:
        return Columns("problems", source)
    raise RecipeError(
        key,
        f"{file} is not here, and the folder's name does not say what its rows are scored by",
        f"set reward.function, or name a file that is here or lies in a folder called {', '.join(_FOLDERS)}",
        value=file,
    )


def _write(columns: Columns, file: str, folder: Path, number: int) -> str:
    path = folder / f"{number}_{Path(file).stem}.parquet"
    return str(write_tiny_rows(path, columns.layout, columns.data_source, _COUNT, number))


def _score(twin: Recipe, sources: set[str], changes: Changes) -> None:
    """Add the coin to the recipe's scorers. It comes first: what the first of several says is right counts."""
    reward = twin.reward
    given = dict(reward.functions) or dict.fromkeys(
        [reward.function] if reward.function else sorted({one.name for one in resolve(None, sources).values()}), 1.0
    )
    why = "and a coin, since a random model's answers are all wrong; evaluation's rows are scored by the same"
    reward.function, reward.functions = None, {COIN: 1.0, **given}
    names = ", ".join(given)
    changes.note("reduced", "reward", names, f"coin, {names}", why)
