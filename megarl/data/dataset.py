"""Base class of all data sets: read rows from files, tokenize them, and filter or reject rows that are too long."""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, overload

import numpy as np

from megarl.data.cache import Encoded
from megarl.data.encode import Encode, encode_files
from megarl.data.rows import Row, iterate_rows, sample_rows, unique_uids
from megarl.data.sampler import MixedSampler, Sampler
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.schema import DataConfig

Item = TypeVar("Item")
_PICTURES = ("images", "videos")  # columns
Files = Sequence[str | Path] | Mapping[str, Sequence[str | Path]]
"""Files of one set, or of several by name."""


@dataclass(frozen=True)
class FileCount:
    """Row counts of one file: rows read, rows read that exceed the length limit, and all rows of the file."""

    file: str
    rows: int
    over: int
    total: int


class RowDataset(Sequence[Item], ABC, Generic[Item]):
    """Rows of files, rendered and tokenized once.

    Attributes:
        sets: number of kept rows of each set, by name. Items are ordered by set.
        counts: row counts of each file.
        notices: warnings for the user: an unusable cache, failed processes, rows without a difficulty.
        longest: tokens of the longest row that was read.
    """

    layouts: Sequence[Sequence[str]]  # alternatives: a file must have all columns of one of them
    optional: Sequence[str]  # columns that are read if present
    source: ClassVar[str]  # data source of a row without one
    per_row: ClassVar[int] = 1  # texts per row that `encode` returns
    text_only: ClassVar[str] = (
        "demonstrations and preferences must be text only; train.source: rollout reads images and videos"
    )
    too_long: ClassVar[str]  # "prompts are longer than data.max_prompt_length"

    def __init__(
        self,
        files: Files,
        tokenizer: Tokenizer,
        config: DataConfig,
        limit: int,
        difficulty: str | None = None,
        sample: int | None = None,
    ) -> None:
        """`limit`: maximum tokens of a row. `difficulty`: name of the number in extra_info that the curriculum sorts by.
        `sample`: rows to read of each file, evenly spread; None: all."""
        self._sample, self._totals, self._names = sample, dict[Path, int](), config.columns
        with gc_disabled():
            self._read(files, tokenizer, config, limit, difficulty)

    def _read(self, files: Files, tokenizer: Tokenizer, config: DataConfig, limit: int, difficulty: str | None) -> None:
        named = files if isinstance(files, Mapping) else {"train": list(files)}
        self.notices: list[str] = []
        if not all(named.values()):
            raise ValueError("no data files were named: set data.train_files (or data.eval_files)")
        parts = [(name, Path(file), self.read(Path(file))) for name, group in named.items() for file in group]
        uids = iter(unique_uids([row for _, _, rows in parts for row in rows], self.source))
        encoded = encode_files(
            [(file, rows) for _, file, rows in parts],
            self.encode(),
            self.per_row,
            tokenizer,
            config,
            self.notices.append,
        )
        self._items: list[Item] = []
        self.sets = dict.fromkeys(named, 0)
        self.counts: list[FileCount] = []
        rows_kept: list[Row] = []
        longest, longest_row = 0, ""
        for (name, file, rows), texts in zip(parts, encoded, strict=True):
            kept = 0
            for number, (row, uid) in enumerate(zip(rows, uids)):  # noqa: B905 - uids go on with the next file
                row_texts = self.expand(row, texts[number * self.per_row : (number + 1) * self.per_row])
                length = max(len(text.tokens) for text in row_texts)
                if length > longest:
                    longest, longest_row = length, row.where
                if length <= limit:
                    self._items.append(self.item(row, uid, row_texts))
                    rows_kept.append(row)
                    kept += 1
            self.sets[name] += kept
            self.counts.append(FileCount(str(file), len(rows), len(rows) - kept, self._totals.get(file, len(rows))))
        self.longest = longest
        self._check_lengths(config, limit, longest, longest_row)
        self.difficulty = None if difficulty is None else self._difficulties(rows_kept, difficulty)

    def read(self, file: Path) -> list[Row]:
        """Read the rows of one file."""
        rows = []
        for row in self.rows_of(file, (*self.optional, *_PICTURES)):
            for column in _PICTURES:
                if row.values.get(column):
                    raise ValueError(f"{row.where}: column {column!r} is not empty, and {self.text_only}")
            rows.append(row)
        if not rows:
            raise ValueError(f"{file}: the file has no rows")
        return rows

    def rows_of(self, file: Path, optional: Sequence[str]) -> Iterable[Row]:
        """Return the rows of one file, or a sample of them, with the columns in `layouts` and `optional`."""
        if self._sample is None:
            return iterate_rows(file, *self.layouts, optional=optional, names=self._names)
        rows, self._totals[file] = sample_rows(file, self._sample, *self.layouts, optional=optional, names=self._names)
        return rows

    def expand(self, row: Row, texts: Sequence[Encoded]) -> Sequence[Encoded]:
        """Return a row's texts with placeholder tokens expanded. Text-only data sets have none."""
        return texts

    @abstractmethod
    def encode(self) -> Encode:
        """Return the function that renders and tokenizes rows."""

    @abstractmethod
    def item(self, row: Row, uid: str, texts: Sequence[Encoded]) -> Item:
        """Build the data set's item for a row from its texts."""

    @property
    def filtered(self) -> int:
        """Number of rows left out because they are too long."""
        return sum(count.over for count in self.counts)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return self._items[index]

    def too_long_by_file(self) -> str:
        """Describe files with rows over the limit, e.g. "3 of 40 in a.parquet, 1 of 7 in b.parquet"."""
        return ", ".join(f"{count.over} of {count.rows} in {count.file}" for count in self.counts if count.over)

    def _check_lengths(self, config: DataConfig, limit: int, longest: int, where: str) -> None:
        empty = [name for name, rows in self.sets.items() if not rows]
        partial = any(count.rows < count.total for count in self.counts)  # rows outside the sample may be shorter
        if not self.filtered or (config.overlong_prompts == "filter" and (partial or not empty)):
            return
        total = sum(count.rows for count in self.counts)
        files = f": {self.too_long_by_file()}" if len(self.counts) > 1 else ""
        nothing_left = f"; nothing is left of data.mix.{empty[0]}" if empty and len(self.sets) > 1 else ""
        advice = "" if empty else ", or set data.overlong_prompts: filter to leave them out"
        raise ValueError(
            f"{self.filtered} of {total} {self.too_long} ({limit} tokens){files}; the longest has {longest} "
            f"({where}){nothing_left}. Raise the limit{advice}"
        )

    def _difficulties(self, rows: Sequence[Row], name: str) -> np.ndarray:
        """Return extra_info[name] of each row: float64 [rows], NaN if missing.

        Raises:
            ValueError: a row's value is not a number, or no row of a set has a value.
        """
        difficulties = np.array([_number(row, name) for row in rows], dtype=np.float64)
        start = 0
        for set_name, size in self.sets.items():
            if np.isnan(difficulties[start : start + size]).all():
                keys = sorted({key for row in rows[start : start + size] for key in row.get("extra_info", dict) or {}})
                of = f" of data.mix.{set_name}" if len(self.sets) > 1 else ""
                raise ValueError(
                    f"data.curriculum: no row{of} has a number {name!r} in extra_info, but {', '.join(keys) or 'nothing'}: "
                    "name one of these that is a number, or leave it out"
                )
            start += size
        unknown = int(np.isnan(difficulties).sum())
        if unknown:
            self.notices.append(f"{unknown} of {len(rows)} rows have no extra_info.{name}: each epoch draws them last")
        return difficulties


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable cyclic garbage collection, which would rescan all rows again and again while they accumulate."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _number(row: Row, name: str) -> float:
    value = (row.get("extra_info", dict) or {}).get(name)
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{row.where}: data.curriculum sorts by extra_info.{name}, which is {value!r}, not a number")
    return float(value)


def sampler_of(data: RowDataset[Any], config: DataConfig, seed: int) -> MixedSampler:
    """Return the sampler that orders the training rows of a run."""
    samplers, start = [], 0
    for stream, size in enumerate(data.sets.values()):
        difficulty = None if data.difficulty is None else data.difficulty[start : start + size]
        samplers.append(Sampler(size, seed, config.shuffle, stream, difficulty, config.curriculum_epochs))
        start += size
    weights = [config.mix[name].weight if config.mix else 1.0 for name in data.sets]
    return MixedSampler(list(data.sets), samplers, weights)
