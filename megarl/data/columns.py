"""Columns to read from a data file, and their names in the file (`data.columns`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import cut_end

GROUND_TRUTH = "ground_truth"  # in `data.columns`: the file's column of plain answers, instead of `reward_model`
_OBJECTS = ("extra_info", "reward_model")  # a file may have them as JSON text


@dataclass(frozen=True)
class ColumnSelection:
    """Columns to read of a file.

    layouts: alternative sets of columns; the file must have all columns of one set. optional: columns to read if present.
    names: `data.columns`: a column to the file's column, or to a field of one, as in ``extra_info.question``. None: no recipe
    names the file, so no setting can rename its columns.
    """

    layouts: Sequence[Sequence[str]]
    optional: Sequence[str] = ()
    names: Mapping[str, str] | None = None

    @property
    def columns(self) -> set[str]:
        return {*self.optional, *(name for layout in self.layouts for name in layout)}

    def source(self, column: str) -> str:
        """Return the name of the file's column that has `column`."""
        return self._path(column)[0]

    def check(self, where: str | Path, present: Iterable[str], *, named: bool = True) -> None:
        """Raise ValueError unless the file's columns `present` include all columns of one layout.

        named: an optional column in `names` must be present, too.
        """
        present = list(present)
        missing = [[column for column in layout if self.source(column) not in present] for layout in self.layouts]
        absent = [column for column in self.named() if self.source(column) not in present] if named else []
        if all(missing) or absent:
            lacks = [absent] if absent else missing
            text = ", or ".join(" and ".join(map(self._label, columns)) for columns in lacks)
            raise ValueError(
                f"{where}: no column {text}; it has {', '.join(present) or 'none'}{self._remedy(lacks[-1])}"
            )

    def values(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the selected columns of a row of the file. ValueError if a field or JSON text in it is wrong."""
        return {column: self._value(where, row, column) for column in self.columns if self.source(column) in row}

    def named(self) -> list[str]:
        """Return the selected columns for which `names` has another name."""
        return [column for column in sorted(self.columns) if self._key(column) in self._names]

    @property
    def _names(self) -> Mapping[str, str]:
        return self.names or {}

    def _remedy(self, lacks: Sequence[str]) -> str:
        """Return the end of the message about missing columns: the setting that gives them the names of the file."""
        unnamed = [column for column in lacks if self._key(column) not in self._names]
        if self.names is None or not unnamed:
            return ""
        keys = ", ".join(f"{GROUND_TRUTH if column == 'reward_model' else column}: NAME" for column in unnamed)
        names = "it under another name" if len(unnamed) == 1 else "them under other names"
        remedy = f". If the file has {names}, write data: {{columns: {{{keys}}}}} in the recipe (docs/data.md)"
        if "data_source" in unnamed:  # needed only where it selects the scorer
            remedy += ". Rows without data_source need one scorer for all, as in reward: {function: gsm8k}"
        return remedy

    def _key(self, column: str) -> str:
        return GROUND_TRUTH if column == "reward_model" and GROUND_TRUTH in self._names else column

    def _path(self, column: str) -> list[str]:
        key = self._key(column)
        return self._names.get(key, key).split(".")

    def _label(self, column: str) -> str:
        key = self._key(column)
        return repr(self.source(column)) + (f" (data.columns.{key})" if key in self._names else "")

    def _value(self, where: str, row: Mapping[str, Any], column: str) -> Any:
        source, *fields = self._path(column)
        value = row[source]
        if isinstance(value, str) and (fields or (column in _OBJECTS and self._key(column) == column)):
            value = _object(where, source, value)
        for name in fields:
            if value is None:
                break
            if not isinstance(value, dict) or name not in value:
                has = ", ".join(map(str, value)) or "none" if isinstance(value, dict) else "none"
                path = self._names[self._key(column)]
                raise ValueError(f"{where}: column {source!r} has no field {path!r}; fields: {has}")
            value = value[name]
        return {GROUND_TRUTH: value} if self._key(column) == GROUND_TRUTH else value


def _object(where: str, column: str, text: str) -> Any:
    """Parse the JSON text of an object. Empty text and null become None; text that does not start with { is returned."""
    if text.strip() in ("", "null"):
        return None
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: column {column!r} is {cut_end(text, 80)!r}, which is not JSON: {error}") from error
