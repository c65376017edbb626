"""Slice tables: the slices of a checkpoint's tensors that a rank holds or needs, as arrays that travel without pickle.

Every tensor is treated as a matrix: one row for a one-dimensional tensor, otherwise its first dimension by all others. A
slice is a range of rows and columns, with its location in a parameter of the rank: element (i, j) of the slice is element
`offset + i * stride + j` of the parameter's memory. Trainers describe the slices they hold, and engines the slices they
need, in the same format.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.hf.families.slices import as_matrix

# Columns of `SliceTable.slices`.
SLICE_COLUMNS = ("tensor", "row", "column", "rows", "columns", "parameter", "offset", "stride")

# Bytes of an element, by torch's name of the dtype.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, eq=False)
class SliceTable:
    """The slices that one rank holds or needs. `tensors` and `shapes` are the checkpoint's, in this rank's order.

    A parameter with its name in `whole` is an entire checkpoint tensor, in the checkpoint's shape. The engine passes it to
    its weight loader, because the engine's parameter is not a plain copy of slices.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[str, ...]
    dtypes: tuple[str, ...]  # of the parameters, by torch's name: "bfloat16"
    slices: np.ndarray  # int64 [n, 8], columns as in SLICE_COLUMNS
    whole: frozenset[str] = frozenset()

    def column(self, name: str) -> np.ndarray:
        return self.slices[:, SLICE_COLUMNS.index(name)]

    @property
    def nbytes(self) -> int:
        """Bytes of all slices, in the parameters' dtypes."""
        sizes = np.array([ITEM_BYTES[dtype] for dtype in self.dtypes], np.int64)
        return int((self.column("rows") * self.column("columns") * sizes[self.column("parameter")]).sum())

    @cached_property
    def digest(self) -> str:
        """Hash of the uncompressed table: equal tables have equal digests on every machine."""
        return hashlib.blake2b(self._uncompressed(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        return zlib.compress(self._uncompressed(), 1)

    def _uncompressed(self) -> bytes:
        """Return the length of a JSON header, the header, and `slices`."""
        header = [self.tensors, self.shapes, self.parameters, self.dtypes, sorted(self.whole)]
        text = json.dumps(header, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + np.ascontiguousarray(self.slices, "<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> SliceTable:
        plain = zlib.decompress(data)
        start = 8 + int.from_bytes(plain[:8], "little")
        tensors, shapes, parameters, dtypes, whole = json.loads(plain[8:start])
        slices = np.frombuffer(plain, "<i8", offset=start).reshape(-1, len(SLICE_COLUMNS))
        return cls(
            tuple(tensors),
            tuple(map(tuple, shapes)),
            tuple(parameters),
            tuple(dtypes),
            slices,
            frozenset(whole),
        )


class SliceTableBuilder:
    """Builds a slice table, slice by slice."""

    def __init__(self) -> None:
        self._tensors: dict[str, int] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._parameters: dict[str, int] = {}
        self._dtypes: list[str] = []
        self._slices: list[tuple[int, ...]] = []
        self._whole: set[str] = set()

    def tensor(self, name: str, shape: Sequence[int]) -> int:
        """Return the number of a checkpoint tensor. Raises ValueError if it was added with another shape."""
        number = self._tensors.setdefault(name, len(self._shapes))
        if number == len(self._shapes):
            self._shapes.append(tuple(shape))
        elif self._shapes[number] != tuple(shape):
            raise ValueError(f"{name} has shape {list(shape)} in one slice and {list(self._shapes[number])} in another")
        return number

    def parameter(self, name: str, dtype: str) -> int:
        number = self._parameters.setdefault(name, len(self._dtypes))
        if number == len(self._dtypes):
            self._dtypes.append(dtype)
        return number

    def add(self, tensor: int, region: tuple[int, int, int, int], parameter: int, offset: int, stride: int) -> None:
        """Add a slice. `region`: first row, first column, rows, columns. `offset`, `stride`: its location in the parameter."""
        self._slices.append((tensor, *region, parameter, offset, stride))

    def add_whole(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """Add an entire tensor that the rank's weight loader takes. See `SliceTable.whole`."""
        rows, columns = as_matrix(shape)
        self._whole.add(name)
        self.add(self.tensor(name, shape), (0, 0, rows, columns), self.parameter(name, dtype), 0, columns)

    def build(self) -> SliceTable:
        return SliceTable(
            tuple(self._tensors),
            tuple(self._shapes),
            tuple(self._parameters),
            tuple(self._dtypes),
            np.array(self._slices, np.int64).reshape(-1, len(SLICE_COLUMNS)),
            frozenset(self._whole),
        )


def held_tensors(tables: Sequence[SliceTable]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (name, shape, dtype) of every tensor that trainer ranks hold, layer by layer: input of engines' slice tables."""
    tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for table in {id(table): table for table in tables}.values():
        for tensor, parameter in dict(
            zip(table.column("tensor").tolist(), table.column("parameter").tolist(), strict=True)
        ).items():
            name = table.tensors[tensor]
            tensors.setdefault(name, (name, table.shapes[tensor], table.dtypes[parameter]))
    return sorted(tensors.values(), key=lambda tensor: _natural_order(tensor[0]))


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
