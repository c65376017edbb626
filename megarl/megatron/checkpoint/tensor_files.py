"""Shards of large tensors in safetensors files: any parallel layout reads the files of any other.

A file holds slices of tensors under the key ``NAME@OFFSET``; its metadata holds the shape of each full tensor. Files
do not record the layout that wrote them, and reading executes no code.
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
class TensorShard:
    """A slice of a full tensor that may be spread over ranks."""

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the slice in the full tensor
    tensor: torch.Tensor  # the slice, with as many dimensions as the full tensor. A view: reading fills it
    padded: bool = False  # the full tensor is padded at its end as the layout needs: stored shapes may differ


def slices_of_range(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the flat elements [start, stop) of a tensor of `shape` as slices (offset, shape), in order.

    Example: elements 1 to 7 of a 3x3 tensor: (0, 1) 1x2, (1, 0) 1x3, (2, 0) 1x1.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # full rows
    if first > last:  # within one row
        yield from _in_row(last, start - last * inner, stop - last * inner, shape)
        return
    yield from _in_row(first - 1, start - (first - 1) * inner, inner, shape) if start < first * inner else ()
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(last, 0, stop - last * inner, shape)


def _in_row(row: int, start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Any]:
    for offset, size in slices_of_range(start, stop, shape[1:]):
        yield (row, *offset), (1, *size)


def write(path: Path, shards: Sequence[TensorShard]) -> FileSum:
    """Write a safetensors file and fsync it. Returns its size (bytes) and CRC-32. Raises OSError."""
    by_key = {f"{shard.name}@{','.join(map(str, shard.offset))}": shard for shard in shards}
    assert len(by_key) == len(shards), "a slice of a tensor would be written twice"
    tensors = ((key, _DTYPES[shard.tensor.dtype], tuple(shard.tensor.shape)) for key, shard in by_key.items())
    header, order = lay_out(tensors, {shard.name: json.dumps(shard.full_shape) for shard in shards})
    size, crc = 0, 0
    with path.open("wb") as file:
        for block in _blocks(header, (by_key[key] for key in order)):
            file.write(block)
            size, crc = size + len(block), zlib.crc32(block, crc)
        file.flush()
        os.fsync(file.fileno())
    return size, crc


def _blocks(header: bytes, shards: Iterable[TensorShard]) -> Iterator[Any]:
    yield header
    for shard in shards:
        flat = shard.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(flat), _BLOCK):
            yield flat[begin : begin + _BLOCK].data


@dataclass(frozen=True)
class _Stored:
    """All stored slices of one tensor: row i of the arrays is slice i, in file files[i] under key keys[i]."""

    full_shape: tuple[int, ...]
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
        self._open = functools.lru_cache(_OPEN_FILES)(
            lambda file: safe_open(directory / file, framework="pt", device="cpu").__enter__()
        )

    def fill(self, shard: TensorShard) -> None:
        """Copy the stored elements of `shard` into `shard.tensor`; padding that is not stored becomes 0.

        Raises ValueError if the tensor is missing, has another shape, or is incomplete.
        """
        stored = self._stored.get(shard.name)
        if stored is None:
            raise ValueError(f"{self.directory} holds no {shard.name}: it was written by another model.")
        if stored.full_shape != shard.full_shape and not (
            shard.padded and len(stored.full_shape) == len(shard.full_shape)
        ):
            shapes = f"{list(stored.full_shape)} there and {list(shard.full_shape)} here"
            raise ValueError(f"{shard.name} is {shapes}: {self.directory} was written by another model.")
        begin = np.array(shard.offset, dtype=np.int64)
        end = begin + np.array(shard.tensor.shape, dtype=np.int64)
        stored_end = np.minimum(end, np.array(stored.full_shape, dtype=np.int64))
        needed = math.prod(np.maximum(stored_end - begin, 0).tolist())
        if needed < shard.tensor.numel():
            shard.tensor.zero_()
        lows, highs = np.maximum(stored.begins, begin), np.minimum(stored.ends, end)
        copied = 0
        for i in np.flatnonzero((lows < highs).all(axis=1)):
            low, high = lows[i], highs[i]
            source = tuple(slice(*pair) for pair in zip(low - stored.begins[i], high - stored.begins[i], strict=True))
            target = tuple(slice(*pair) for pair in zip(low - begin, high - begin, strict=True))
            part = self._read(stored.files[i], stored.keys[i], source)
            shard.tensor[target].copy_(part)
            copied += part.numel()
        if copied != needed:
            raise ValueError(f"{self.directory} holds {copied} of the {needed} elements of {shard.name} needed here.")

    def _read(self, file: str, key: str, where: tuple[slice, ...]) -> torch.Tensor:
        handle = self._open(file)
        if not where:
            return handle.get_tensor(key)
        return handle.get_slice(key)[tuple(slice(int(part.start), int(part.stop)) for part in where)]


def _read_headers(directory: Path) -> dict[str, _Stored]:
    """Index all stored slices by tensor name. Raises AssertionError if two files disagree on a tensor's full shape."""
    slices: dict[str, tuple[tuple[int, ...], list[Any]]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        full_shapes = {name: tuple(json.loads(shape)) for name, shape in header.pop("__metadata__").items()}
        for key, entry in header.items():
            name, _, offset = key.rpartition("@")
            begin = tuple(int(number) for number in offset.split(",")) if offset else ()
            shape, rows = slices.setdefault(name, (full_shapes[name], []))
            assert shape == full_shapes[name], f"{name} is {shape} in one file and {full_shapes[name]} in {path.name}"
            rows.append((begin, entry["shape"], path.name, key))
    stored = {}
    for name, (shape, rows) in slices.items():
        begins = np.array([row[0] for row in rows], dtype=np.int64).reshape(len(rows), len(shape))
        sizes = np.array([row[1] for row in rows], dtype=np.int64).reshape(len(rows), len(shape))
        stored[name] = _Stored(shape, begins, begins + sizes, [row[2] for row in rows], [row[3] for row in rows])
    return stored
