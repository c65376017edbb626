"""Which boxes that engines need lie in which boxes that trainers hold: arithmetic on arrays, for all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megarl.weight_sync.sharded.slices import ITEM_BYTES, SliceTable

# Columns of `Side.boxes`. Two boxes are the same where all of these are.
KEY = ("tensor", "row", "column", "rows", "columns", "dtype")
# Columns of what `match` returns: numbers of boxes of both sides, and what they have in common.
PIECE = ("need", "have", "row", "column", "rows", "columns")

DTYPES = tuple(ITEM_BYTES)
ITEM_SIZES = np.array([ITEM_BYTES[dtype] for dtype in DTYPES], np.int64)
_SHOWN = 4  # ranks in an error


@dataclass(frozen=True, eq=False)
class Side:
    """All boxes of all trainer ranks, or of all engine ranks, each different one once.

    Ranks with equal descriptions are one class. Box k stands in the descriptions of classes
    `classes[starts[k]:starts[k + 1]]`, there as boxes `rows[...]`; the ranks of these are `groups[group[k]]`.
    """

    ranks: str  # "trainer" or "engine": for errors
    tables: tuple[SliceTable, ...]  # of the classes
    class_of: np.ndarray  # of each rank
    slices: np.ndarray  # int64 [n, 6], columns as in KEY, sorted
    starts: np.ndarray  # int64 [n + 1]
    classes: np.ndarray
    rows: np.ndarray
    group: np.ndarray  # int64 [n]
    groups: tuple[tuple[int, ...], ...]

    def holders(self, box: int) -> tuple[int, ...]:
        return self.groups[self.group[box]]

    def local(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the boxes that stand in the description of `rank`, rising, and where they stand there."""
        own = self.classes == self.class_of[rank]
        boxes = np.repeat(np.arange(len(self.slices)), np.diff(self.starts))
        return boxes[own], self.rows[own]


def gather(ranks: str, descriptions: Sequence[SliceTable], numbers: Mapping[str, int]) -> Side:
    """`numbers`: of the tensors, by name."""
    alike, class_of = _classes(descriptions)
    entries = np.concatenate([_entries(one, number, numbers) for number, one in enumerate(alike)])
    entries = entries[np.lexsort(entries.T[::-1])]
    first = np.ones(len(entries), bool)
    first[1:] = (entries[1:, : len(KEY)] != entries[:-1, : len(KEY)]).any(1)
    starts = np.append(np.flatnonzero(first), len(entries))
    classes = np.ascontiguousarray(entries[:, len(KEY)])
    group, groups = _groups(classes, starts, class_of)
    return Side(
        ranks, alike, class_of, entries[first, : len(KEY)], starts, classes, entries[:, len(KEY) + 1], group, groups
    )


def match(needs: Side, haves: Side, names: Sequence[str]) -> np.ndarray:
    """int64 [n, 6], columns as in PIECE: every element of each needed box once. ValueError where there are holes, or
    where trainers hold parts of each other's boxes."""
    _refuse_overlaps(haves, names)
    need, have, common = _pairs(needs.slices, haves.slices)
    found = np.bincount(need, common[:, 2] * common[:, 3], len(needs.slices))
    for box in np.flatnonzero(found != needs.slices[:, 3] * needs.slices[:, 4])[:1]:
        _, row, column, rows, columns, _ = needs.slices[box].tolist()
        raise ValueError(
            f"{_ranks(needs, box)} need {rows} rows from row {row} and {columns} columns from column {column} of "
            f"{names[needs.slices[box, 0]]}: of these {rows * columns:,} elements the trainers hold {int(found[box]):,}"
        )
    return np.column_stack([need, have, common])


def split(pieces: np.ndarray, item: np.ndarray, limit: int) -> np.ndarray:
    """`pieces` cut until none has more than `limit` bytes: by rows, and by columns where a row is larger. `item`: bytes of
    an element of each."""
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
    return cut


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For `counts` of [2, 0, 3]: [0, 0, 2, 2, 2] and [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _classes(descriptions: Sequence[SliceTable]) -> tuple[tuple[SliceTable, ...], np.ndarray]:
    alike: dict[str, SliceTable] = {}
    numbers: dict[str, int] = {}
    class_of = []
    for one in descriptions:
        alike.setdefault(one.digest, one)
        class_of.append(numbers.setdefault(one.digest, len(numbers)))
    return tuple(alike.values()), np.array(class_of, np.int64)


def _entries(one: SliceTable, number: int, numbers: Mapping[str, int]) -> np.ndarray:
    """Boxes as in KEY, then the class and the number in the description."""
    boxes = one.slices
    tensors = np.array([numbers[name] for name in one.tensors], np.int64)
    dtypes = np.array([DTYPES.index(dtype) for dtype in one.dtypes], np.int64)
    own = (np.full(len(boxes), number), np.arange(len(boxes)))
    return np.column_stack([tensors[boxes[:, 0]], boxes[:, 1:5], dtypes[boxes[:, 5]], *own])


def _groups(
    classes: np.ndarray, starts: np.ndarray, class_of: np.ndarray
) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Which ranks have each box, as the number of a group."""
    numbers: dict[bytes, int] = {}
    bounds = starts.tolist()
    group = [numbers.setdefault(classes[start:stop].tobytes(), len(numbers)) for start, stop in pairwise(bounds)]
    members = [np.frombuffer(key, np.int64) for key in numbers]
    groups = [tuple(np.flatnonzero(np.isin(class_of, one)).tolist()) for one in members]
    return np.array(group, np.int64), tuple(groups)


def _pairs(ones: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of boxes (columns as in KEY, sorted) that have elements in common, and which: row, column, rows, columns."""
    low = np.searchsorted(others[:, 0], ones[:, 0], "left")
    one, place = expand(np.searchsorted(others[:, 0], ones[:, 0], "right") - low)
    other = low[one] + place
    a, b = ones[one], others[other]
    start = np.maximum(a[:, 1:3], b[:, 1:3])
    size = np.minimum(a[:, 1:3] + a[:, 3:5], b[:, 1:3] + b[:, 3:5]) - start
    both = (size > 0).all(1)
    return one[both], other[both], np.hstack([start, size])[both]


def _refuse_overlaps(haves: Side, names: Sequence[str]) -> None:
    one, other, common = _pairs(haves.slices, haves.slices)
    for pair in np.flatnonzero(one < other)[:1]:
        row, column, rows, columns = common[pair].tolist()
        raise ValueError(
            f"{_ranks(haves, one[pair])} and {_ranks(haves, other[pair])} hold boxes of {names[haves.slices[one[pair], 0]]} "
            f"that are not the same, but have {rows} rows from row {row} and {columns} columns from column {column} in "
            f"common (or hold them in different types): a plan cannot tell which of them is right"
        )


def _ranks(side: Side, box: int) -> str:
    ranks = side.holders(box)
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f", ... ({len(ranks)})" if len(ranks) > _SHOWN else "")
    return f"{side.ranks} rank{'s' if len(ranks) > 1 else ''} {shown}"
