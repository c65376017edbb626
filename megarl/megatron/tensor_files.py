"""Pieces of large tensors in safetensors files: written by many ranks, read by others that are cut differently.

A file holds boxes of tensors: ``NAME@OFFSET`` with the box's shape, and in its metadata the shape of each
whole tensor. Nothing in a file says which layout wrote it, and nothing in it is executed when it is read.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from megarl.checkpoint.manifest import FileSum
from megarl.hf.safetensors_header import lay_out

_BLOCK = 1 << 24
_OPEN_FILES = 64
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that no rank need hold whole."""

    name: str
    whole: tuple[int, ...]  # shape of the whole tensor
    offset: tuple[int, ...]  # of the box in it
    tensor: torch.Tensor  # the box; as many dimensions as the whole tensor. A view: reading fills it
    padded: bool = False  # the whole tensor is padded at its ends, as far as a layout needs: shapes may differ


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The flat elements [start, stop) of a tensor of `shape`, as boxes (offset, shape) in their order.

    Example: elements 1 to 7 of a 3x3 tensor: (0, 1) 1x2, (1, 0) 1x3, (2, 0) 1x1.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        yield from _in_row(last, start - last * inner, stop - last * inner, shape)
        return
    yield from _in_row(first - 1, start - (first - 1) * inner, inner, shape) if start < first * inner else ()
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(last, 0, stop - last * inner, shape)


def _in_row(row: int, start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Any]:
    for offset, size in boxes(start, stop, shape[1:]):
        yield (row, *offset), (1, *size)


def write(path: Path, pieces: Sequence[Piece]) -> FileSum:
    """Write a safetensors file that is on the disk when this returns. Raises OSError."""
    by_key = {f"{piece.name}@{','.join(map(str, piece.offset))}": piece for piece in pieces}
    assert len(by_key) == len(pieces), "a box of a tensor would be written twice"
    tensors = ((key, _DTYPES[piece.tensor.dtype], tuple(piece.tensor.shape)) for key, piece in by_key.items())
    header, places = lay_out(tensors, {piece.name: json.dumps(piece.whole) for piece in pieces})
    size, crc = 0, 0
    with path.open("wb") as file:
        for block in _blocks(header, (by_key[key] for key in places)):
            file.write(block)
            size, crc = size + len(block), zlib.crc32(block, crc)
        file.flush()
        os.fsync(file.fileno())
    return size, crc


def _blocks(header: bytes, pieces: Iterable[Piece]) -> Iterator[Any]:
    yield header
    for piece in pieces:
        flat = piece.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(flat), _BLOCK):
            yield flat[begin : begin + _BLOCK].data


@dataclass(frozen=True)
class _Stored:
    """Every box of one tensor: row i of the arrays is box i, in file files[i] under key keys[i]."""

    whole: tuple[int, ...]
    begins: np.ndarray
    ends: np.ndarray
    files: list[str]
    keys: list[str]


class TensorFiles:
    """The safetensors files of a folder, as one set of tensors. Collective: rank 0 reads the headers for all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = [_read_headers(directory)] if torch.distributed.get_rank() == 0 else [None]
        torch.distributed.broadcast_object_list(index, src=0)
        assert index[0] is not None
        self._stored: dict[str, _Stored] = index[0]
        self._open = functools.lru_cache(_OPEN_FILES)(self._open_file)

    def fill(self, piece: Piece) -> None:
        """Copy what the files hold into `piece.tensor`. Padding that they do not hold becomes 0.

        Raises ValueError where a tensor is missing, has another shape, or is not there whole.
        """
        stored = self._stored.get(piece.name)
        if stored is None:
            raise ValueError(f"{self.directory} holds no {piece.name}: it was written by another model.")
        if stored.whole != piece.whole and not (piece.padded and len(stored.whole) == len(piece.whole)):
            shapes = f"{list(stored.whole)} there and {list(piece.whole)} here"
            raise ValueError(f"{piece.name} is {shapes}: {self.directory} was written by another model.")
        begin = np.array(piece.offset, dtype=np.int64)
        end = begin + np.array(piece.tensor.shape, dtype=np.int64)
        wanted = math.prod(np.maximum(np.minimum(end, np.array(stored.whole, dtype=np.int64)) - begin, 0).tolist())
        if wanted < piece.tensor.numel():
            piece.tensor.zero_()
        lows, highs = np.maximum(stored.begins, begin), np.minimum(stored.ends, end)
        found = 0
        for box in np.flatnonzero((lows < highs).all(axis=1)):
            low, high = lows[box], highs[box]
            there = tuple(
                slice(*pair) for pair in zip(low - stored.begins[box], high - stored.begins[box], strict=True)
            )
            here = tuple(slice(*pair) for pair in zip(low - begin, high - begin, strict=True))
            part = self._read(stored.files[box], stored.keys[box], there)
            piece.tensor[here].copy_(part)
            found += part.numel()
        if found != wanted:
            raise ValueError(f"{self.directory} holds {found} of the {wanted} elements of {piece.name} wanted here.")

    def _read(self, file: str, key: str, where: tuple[slice, ...]) -> torch.Tensor:
        handle = self._open(file)
        if not where:
            return handle.get_tensor(key)
        return handle.get_slice(key)[tuple(slice(int(part.start), int(part.stop)) for part in where)]

    def _open_file(self, file: str) -> Any:
        return safe_open(self.directory / file, framework="pt", device="cpu").__enter__()


def _read_headers(directory: Path) -> dict[str, _Stored]:
    """Where every box lies. Raises ValueError where two boxes of a name differ in their whole."""
    found: dict[str, tuple[tuple[int, ...], list[Any]]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        wholes = {name: tuple(json.loads(shape)) for name, shape in header.pop("__metadata__").items()}
        for key, entry in header.items():
            name, _, offset = key.rpartition("@")
            begin = tuple(int(number) for number in offset.split(",")) if offset else ()
            whole, rows = found.setdefault(name, (wholes[name], []))
            assert whole == wholes[name], f"{name} is {whole} in one file and {wholes[name]} in {path.name}"
            rows.append((begin, entry["shape"], path.name, key))
    stored = {}
    for name, (whole, rows) in found.items():
        begins = np.array([row[0] for row in rows], dtype=np.int64).reshape(len(rows), len(whole))
        sizes = np.array([row[1] for row in rows], dtype=np.int64).reshape(len(rows), len(whole))
        stored[name] = _Stored(whole, begins, begins + sizes, [row[2] for row in rows], [row[3] for row in rows])
    return stored
