"""What one rank holds, or needs, of a checkpoint's tensors: boxes, as arrays that travel without pickle.

A tensor of the checkpoint is seen as a matrix: of one row where it has one dimension, else of its first dimension by all
others. A box is some of its rows and columns, and where they lie in a parameter of this rank: element
(i, j) of the box is element `offset + i * stride + j` of the parameter's memory. Trainers describe what they hold,
engines what they need, in the same words.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# Columns of `SliceTable.boxes`.
BOX = ("tensor", "row", "column", "rows", "columns", "parameter", "offset", "stride")

# Bytes of an element, by torch's name of the type.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of the checkpoint."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True, eq=False)
class SliceTable:
    """Of one rank. `tensors` and `shapes` are those of the checkpoint that it has to do with, in its own order.

    A parameter whose name is in `whole` is a tensor of the checkpoint itself, in the checkpoint's shape, which an engine
    puts through its own loader: it makes something else of it than copies of boxes.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[str, ...]
    dtypes: tuple[str, ...]  # of the parameters, by torch's names: "bfloat16"
    slices: np.ndarray  # int64 [n, 8], columns as in BOX
    whole: frozenset[str] = frozenset()

    def column(self, name: str) -> np.ndarray:
        return self.slices[:, BOX.index(name)]

    @property
    def nbytes(self) -> int:
        """Of all boxes, in the parameters' types."""
        sizes = np.array([ITEM_BYTES[dtype] for dtype in self.dtypes], np.int64)
        return int((self.column("rows") * self.column("columns") * sizes[self.column("parameter")]).sum())

    @cached_property
    def digest(self) -> str:
        """Equal for ranks that hold, or need, the same; whatever compresses there, which differs between machines."""
        return hashlib.blake2b(_plain(self._head, [self.slices]), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        return to_bytes(self._head, [self.slices])

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "shapes": self.shapes,
            "parameters": self.parameters,
            "dtypes": self.dtypes,
            "whole": sorted(self.whole),
        }

    @classmethod
    def from_bytes(cls, data: bytes) -> SliceTable:
        head, (boxes,) = from_bytes(data)
        return cls(
            tuple(head["tensors"]),
            tuple(map(tuple, head["shapes"])),
            tuple(head["parameters"]),
            tuple(head["dtypes"]),
            boxes,
            frozenset(head["whole"]),
        )


class SliceTableBuilder:
    """Makes a description, box by box."""

    def __init__(self) -> None:
        self._tensors: dict[str, int] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._parameters: dict[str, int] = {}
        self._dtypes: list[str] = []
        self._boxes: list[tuple[int, ...]] = []
        self._whole: set[str] = set()

    def tensor(self, name: str, shape: Sequence[int]) -> int:
        """The number of a tensor of the checkpoint. ValueError where it was told with another shape before."""
        number = self._tensors.setdefault(name, len(self._shapes))
        if number == len(self._shapes):
            self._shapes.append(tuple(shape))
        elif self._shapes[number] != tuple(shape):
            raise ValueError(f"{name} is described as {list(shape)}, and as {list(self._shapes[number])}")
        return number

    def parameter(self, name: str, dtype: str) -> int:
        number = self._parameters.setdefault(name, len(self._dtypes))
        if number == len(self._dtypes):
            self._dtypes.append(dtype)
        return number

    def add(self, tensor: int, box: tuple[int, int, int, int], parameter: int, offset: int, stride: int) -> None:
        """`box`: its first row and column, its rows and columns. `offset` and `stride` are the parameter's."""
        self._boxes.append((tensor, *box, parameter, offset, stride))

    def add_whole(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """A tensor that no parameter of this rank is a box of."""
        rows, columns = as_matrix(shape)
        self._whole.add(name)
        self.add(self.tensor(name, shape), (0, 0, rows, columns), self.parameter(name, dtype), 0, columns)

    def build(self) -> SliceTable:
        return SliceTable(
            tuple(self._tensors),
            tuple(self._shapes),
            tuple(self._parameters),
            tuple(self._dtypes),
            np.array(self._boxes, np.int64).reshape(-1, len(BOX)),
            frozenset(self._whole),
        )


def to_bytes(head: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Plain values and int64 arrays as one compressed message."""
    return zlib.compress(_plain(head, arrays), 1)


def _plain(head: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    told = json.dumps([head, [array.shape for array in arrays]], separators=(",", ":")).encode()
    body = b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)
    return len(told).to_bytes(8, "little") + told + body


def from_bytes(data: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    plain = zlib.decompress(data)
    start = 8 + int.from_bytes(plain[:8], "little")
    head, shapes = json.loads(plain[8:start])
    arrays = []
    for shape in shapes:
        count = math.prod(shape)
        arrays.append(np.frombuffer(plain, "<i8", count, start).reshape(shape))
        start += 8 * count
    return head, arrays


def held_tensors(haves: Sequence[SliceTable]) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and types of all that trainer ranks hold, layer by layer: what `vllm_needs.needs` asks about."""
    found: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for one in {id(one): one for one in haves}.values():
        for tensor, parameter in dict(
            zip(one.column("tensor").tolist(), one.column("parameter").tolist(), strict=True)
        ).items():
            name = one.tensors[tensor]
            found.setdefault(name, (name, one.shapes[tensor], one.dtypes[parameter]))
    return sorted(found.values(), key=lambda one: _in_order(one[0]))


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Layer 10 comes after layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
