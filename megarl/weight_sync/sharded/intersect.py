"""Intersect the slices that engines need with the slices that trainers hold: array arithmetic for all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megarl.weight_sync.sharded.slices import ITEM_BYTES, SliceTable

# Columns of `SliceIndex.slices`. Slices that are equal in all of these are the same slice.
SLICE_KEY = ("tensor", "row", "column", "rows", "columns", "dtype")
# Columns of pieces: the number of a needed slice, the number of a held slice, and the region that they share.
PIECE_COLUMNS = ("need", "have", "row", "column", "rows", "columns")

DTYPES = tuple(ITEM_BYTES)
ITEM_SIZES = np.array([ITEM_BYTES[dtype] for dtype in DTYPES], np.int64)
_SHOWN = 4  # ranks in an error message


@dataclass(frozen=True, eq=False)
class SliceIndex:
    """The distinct slices of all trainer ranks, or of all engine ranks.

    Ranks with equal slice tables form a class. Slice k is in the tables of classes `classes[starts[k]:starts[k + 1]]`, at
    rows `rows[starts[k]:starts[k + 1]]`; the ranks of these classes are `groups[group[k]]`.
    """

    ranks: str  # "trainer" or "engine", for messages
    tables: tuple[SliceTable, ...]  # of the classes
    class_of: np.ndarray  # class of each rank
    slices: np.ndarray  # int64 [n, 6], columns as in SLICE_KEY, sorted
    starts: np.ndarray  # int64 [n + 1]
    classes: np.ndarray
    rows: np.ndarray
    group: np.ndarray  # int64 [n]
    groups: tuple[tuple[int, ...], ...]

    def of_rank(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the slices in the table of `rank`, rising, and their rows there."""
        in_class = self.classes == self.class_of[rank]
        numbers = np.repeat(np.arange(len(self.slices)), np.diff(self.starts))
        return numbers[in_class], self.rows[in_class]


def index_slices(ranks: str, tables: Sequence[SliceTable], numbers: Mapping[str, int]) -> SliceIndex:
    """Index the slice tables of all ranks of one side. `numbers`: of the tensors, by name.

    Raises ValueError for a parameter of a dtype that is not in `DTYPES`.
    """
    distinct, class_of = _classes(tables)
    _check_dtypes(ranks, distinct)
    entries = np.concatenate([_entries(table, number, numbers) for number, table in enumerate(distinct)])
    entries = entries[np.lexsort(entries.T[::-1])]
    first = np.ones(len(entries), bool)
    first[1:] = (entries[1:, : len(SLICE_KEY)] != entries[:-1, : len(SLICE_KEY)]).any(1)
    starts = np.append(np.flatnonzero(first), len(entries))
    classes = np.ascontiguousarray(entries[:, len(SLICE_KEY)])
    group, groups = _groups(classes, starts, class_of)
    return SliceIndex(
        ranks=ranks,
        tables=distinct,
        class_of=class_of,
        slices=entries[first, : len(SLICE_KEY)],
        starts=starts,
        classes=classes,
        rows=entries[:, len(SLICE_KEY) + 1],
        group=group,
        groups=groups,
    )


def intersect(needed: SliceIndex, held: SliceIndex, names: Sequence[str]) -> np.ndarray:
    """Cover every element of each needed slice once: int64 [n, 6], columns as in PIECE_COLUMNS.

    Raises ValueError if elements are missing, or if trainers hold slices that overlap without being equal.
    """
    _refuse_overlaps(held, names)
    need, have, regions = _pairs(needed.slices, held.slices)
    covered = np.bincount(need, regions[:, 2] * regions[:, 3], len(needed.slices))
    for number in np.flatnonzero(covered != needed.slices[:, 3] * needed.slices[:, 4])[:1]:
        _, row, column, rows, columns, _ = needed.slices[number].tolist()
        raise ValueError(
            f"{_ranks(needed, number)} need {rows} rows from row {row} and {columns} columns from column {column} of "
            f"{names[needed.slices[number, 0]]}: of these {rows * columns:,} elements the trainers hold "
            f"{int(covered[number]):,}"
        )
    return np.column_stack([need, have, regions])


def elements(pieces: np.ndarray) -> np.ndarray:
    """Return the number of elements of each piece: int64 [n]."""
    return pieces[:, PIECE_COLUMNS.index("rows")] * pieces[:, PIECE_COLUMNS.index("columns")]


def split_pieces(pieces: np.ndarray, item: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut `pieces` until none has more than `limit` bytes: by rows, and by columns if one row is larger.

    `item`: bytes of an element of each piece. Returns the parts, and for each the number of its piece.
    """
    rows, columns = pieces[:, 4], pieces[:, 5]
    wide = np.minimum(columns, np.maximum(limit // item, 1))
    high = np.where(wide == columns, np.minimum(rows, np.maximum(limit // (columns * item), 1)), 1)
    across, down = -(-columns // wide), -(-rows // high)
    parts = across * down
    origin = np.repeat(np.arange(len(pieces)), parts)
    number = np.arange(len(origin)) - np.repeat(np.cumsum(parts) - parts, parts)
    row, column = number // across[origin] * high[origin], number % across[origin] * wide[origin]
    cut = pieces[origin]
    cut[:, 2] += row
    cut[:, 3] += column
    cut[:, 4] = np.minimum(high[origin], rows[origin] - row)
    cut[:, 5] = np.minimum(wide[origin], columns[origin] - column)
    return cut, origin


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expand counts to (index, position) pairs: [2, 0, 3] gives [0, 0, 2, 2, 2] and [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _classes(tables: Sequence[SliceTable]) -> tuple[tuple[SliceTable, ...], np.ndarray]:
    distinct: dict[str, SliceTable] = {}
    numbers: dict[str, int] = {}
    class_of = []
    for table in tables:
        distinct.setdefault(table.digest, table)
        class_of.append(numbers.setdefault(table.digest, len(numbers)))
    return tuple(distinct.values()), np.array(class_of, np.int64)


def _check_dtypes(ranks: str, tables: Sequence[SliceTable]) -> None:
    for table in tables:
        for parameter, dtype in zip(table.parameters, table.dtypes, strict=True):
            if dtype not in DTYPES:
                raise ValueError(
                    f"{ranks} parameter {parameter!r} is {dtype}, but slices are sent as {', '.join(DTYPES[:-1])} or "
                    f"{DTYPES[-1]}: set weight_sync.route=full"
                )


def _entries(table: SliceTable, number: int, numbers: Mapping[str, int]) -> np.ndarray:
    """Return the slices of a table, columns as in SLICE_KEY, followed by the class `number` and the row in the table."""
    slices = table.slices
    tensors = np.array([numbers[name] for name in table.tensors], np.int64)
    dtypes = np.array([DTYPES.index(dtype) for dtype in table.dtypes], np.int64)
    origin = (np.full(len(slices), number), np.arange(len(slices)))
    return np.column_stack([tensors[slices[:, 0]], slices[:, 1:5], dtypes[slices[:, 5]], *origin])


def _groups(
    classes: np.ndarray, starts: np.ndarray, class_of: np.ndarray
) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Return the group of each slice, and the ranks of each group."""
    numbers: dict[bytes, int] = {}
    bounds = starts.tolist()
    group = [numbers.setdefault(classes[start:stop].tobytes(), len(numbers)) for start, stop in pairwise(bounds)]
    members = [np.frombuffer(key, np.int64) for key in numbers]
    groups = [tuple(np.flatnonzero(np.isin(class_of, member)).tolist()) for member in members]
    return np.array(group, np.int64), tuple(groups)


def _pairs(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of overlapping slices (columns as in SLICE_KEY, sorted) and the row, column, rows, columns shared."""
    low = np.searchsorted(right[:, 0], left[:, 0], "left")
    first, position = expand(np.searchsorted(right[:, 0], left[:, 0], "right") - low)
    second = low[first] + position
    a, b = left[first], right[second]
    start = np.maximum(a[:, 1:3], b[:, 1:3])
    size = np.minimum(a[:, 1:3] + a[:, 3:5], b[:, 1:3] + b[:, 3:5]) - start
    overlap = (size > 0).all(1)
    return first[overlap], second[overlap], np.hstack([start, size])[overlap]


def _refuse_overlaps(held: SliceIndex, names: Sequence[str]) -> None:
    first, second, regions = _pairs(held.slices, held.slices)
    for pair in np.flatnonzero(first < second)[:1]:
        row, column, rows, columns = regions[pair].tolist()
        raise ValueError(
            f"{_ranks(held, first[pair])} and {_ranks(held, second[pair])} hold slices of "
            f"{names[held.slices[first[pair], 0]]} that are not the same, but have {rows} rows from row {row} and {columns} "
            f"columns from column {column} in common (or hold them in different types): a plan cannot tell which is right"
        )


def _ranks(index: SliceIndex, number: int) -> str:
    ranks = index.groups[index.group[number]]
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f", ... ({len(ranks)})" if len(ranks) > _SHOWN else "")
    return f"{index.ranks} rank{'s' if len(ranks) > 1 else ''} {shown}"
