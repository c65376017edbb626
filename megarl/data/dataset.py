"""What all data sets have in common: files to rows, rows to tokens, and what is too long left out or refused."""

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
    """Rows of one file: those that were read, those of them that were longer than the limit, and all."""

    file: str
    rows: int
    over: int
    total: int


class RowDataset(Sequence[Item], ABC, Generic[Item]):
    """Rows of files, rendered and tokenised once.

    Attributes:
        sets: rows that stayed of each set, by name; they lie one set after another.
        counts: what each file held, and what of it was too long.
        notices: what a person should know: a cache or processes that could not be used, rows without a difficulty.
        longest: tokens of the longest row that was read.
    """

    layouts: Sequence[Sequence[str]]  # columns, of which one set must be there in full
    optional: Sequence[str]  # columns that are read where they are there
    source: ClassVar[str]  # data source of a row that names none
    per_row: ClassVar[int] = 1  # texts that `encode` makes of a row
    text_alone: ClassVar[str] = "demonstrations and preferences are text alone: train.source: rollout reads images"
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
        """`limit`: tokens of the longest row. `difficulty`: the number of extra_info that a curriculum goes by. `sample`:
        rows to read of each file, spread over it; None: all."""
        self._sample, self._totals = sample, dict[Path, int]()
        with without_collection():
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
                own = self.whole(row, texts[number * self.per_row : (number + 1) * self.per_row])
                length = max(len(text.tokens) for text in own)
                if length > longest:
                    longest, longest_row = length, row.where
                if length <= limit:
                    self._items.append(self.item(row, uid, own))
                    rows_kept.append(row)
                    kept += 1
            self.sets[name] += kept
            self.counts.append(FileCount(str(file), len(rows), len(rows) - kept, self._totals.get(file, len(rows))))
        self.longest = longest
        self._check_lengths(config, limit, longest, longest_row)
        self.difficulty = None if difficulty is None else self._difficulties(rows_kept, difficulty)

    def read(self, file: Path) -> list[Row]:
        """The rows of one file."""
        rows = []
        for row in self.rows_of(file, (*self.optional, *_PICTURES)):
            for column in _PICTURES:
                if row.values.get(column):
                    raise ValueError(f"{row.where}: column {column!r} is not empty, and {self.text_alone}")
            rows.append(row)
        if not rows:
            raise ValueError(f"{file}: the file has no rows")
        return rows

    def rows_of(self, file: Path, optional: Sequence[str]) -> Iterable[Row]:
        """The rows of one file, or the sample of them, with the columns of `layouts` and `optional`."""
        if self._sample is None:
            return iterate_rows(file, *self.layouts, optional=optional)
        rows, self._totals[file] = sample_rows(file, self._sample, *self.layouts, optional=optional)
        return rows

    def whole(self, row: Row, texts: Sequence[Encoded]) -> Sequence[Encoded]:
        """A row's texts as a model reads them: what does not come from the text alone is added here."""
        return texts

    @abstractmethod
    def encode(self) -> Encode:
        """The function that makes texts of rows."""

    @abstractmethod
    def item(self, row: Row, uid: str, texts: Sequence[Encoded]) -> Item:
        """A row as it is drawn, from its texts."""

    @property
    def filtered(self) -> int:
        """Rows left out because they are too long."""
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
        """ "3 of 40 in a.parquet, 1 of 7 in b.parquet": the files that had rows of more than the limit."""
        return ", ".join(f"{count.over} of {count.rows} in {count.file}" for count in self.counts if count.over)

    def _check_lengths(self, config: DataConfig, limit: int, longest: int, where: str) -> None:
        empty = [name for name, rows in self.sets.items() if not rows]
        partial = any(count.rows < count.total for count in self.counts)  # of all rows some may be shorter
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
        """float64 [rows]: `name` of each row's extra_info; NaN where it is missing.

        Raises:
            ValueError: it is no number in a row, or a set has it in no row.
        """
        found = np.array([_number(row, name) for row in rows], dtype=np.float64)
        start = 0
        for part, size in self.sets.items():
            if np.isnan(found[start : start + size]).all():
                there = sorted({key for row in rows[start : start + size] for key in row.get("extra_info", dict) or {}})
                of = f" of data.mix.{part}" if len(self.sets) > 1 else ""
                raise ValueError(
                    f"data.curriculum: no row{of} has a number {name!r} in extra_info, but {', '.join(there) or 'nothing'}: "
                    "name one of these that is a number, or leave it out"
                )
            start += size
        unknown = int(np.isnan(found).sum())
        if unknown:
            self.notices.append(f"{unknown} of {len(rows)} rows have no extra_info.{name}: each epoch draws them last")
        return found


@contextmanager
def without_collection() -> Iterator[None]:
    """Python's search for cycles, which goes over all rows again and again while they pile up, waits until the end."""
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
        raise ValueError(f"{row.where}: data.curriculum goes by extra_info.{name}, which is {value!r}, not a number")
    return float(value)


def sampler_of(data: RowDataset[Any], config: DataConfig, seed: int) -> MixedSampler:
    """The order in which a run draws the rows of its training data."""
    samplers, start = [], 0
    for stream, size in enumerate(data.sets.values()):
        difficulty = None if data.difficulty is None else data.difficulty[start : start + size]
        samplers.append(Sampler(size, seed, config.shuffle, stream, difficulty, config.curriculum_epochs))
        start += size
    weights = [config.mix[name].weight if config.mix else 1.0 for name in data.sets]
    return MixedSampler(list(data.sets), samplers, weights)
