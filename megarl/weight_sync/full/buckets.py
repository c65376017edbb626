"""Buckets of whole tensors: cut an export into buckets, pack them, and describe their contents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.weight_sync.session import abbreviate_names

_ALIGNMENT = 64  # bytes; every data type's alignment, and a cache line


@dataclass(frozen=True)
class BucketEntry:
    """One tensor of a bucket and its location there."""

    name: str
    dtype: str  # torch's name: "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the bucket's start


@dataclass(frozen=True)
class Bucket:
    """Tensors to be packed together. `nbytes` includes alignment."""

    entries: list[BucketEntry]
    tensors: list[torch.Tensor]
    nbytes: int
    last: bool  # of its version


def fill_buckets(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Cut `weights` into buckets of at most `bucket_bytes`; a larger tensor is a bucket alone.

    Tensors are not copied before their bucket is full: the iterator must not reuse their memory until then. Raises
    ValueError for an empty export and for a duplicate name.
    """
    entries: list[BucketEntry] = []
    tensors: list[torch.Tensor] = []
    used = 0
    names: set[str] = set()
    for name, tensor in weights:
        if name in names:
            raise ValueError(f"weight {name!r} was exported twice in one version")
        names.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        size = max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT  # at least one unit: empty memory cannot be mapped
        if entries and used + size > bucket_bytes:
            yield Bucket(entries, tensors, used, last=False)
            entries, tensors, used = [], [], 0
        entries.append(BucketEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), used))
        tensors.append(tensor)
        used += size
    if not entries:
        raise ValueError("an update without weights: the trainer's export yielded nothing")
    yield Bucket(entries, tensors, used, last=True)


def pack(bucket: Bucket, memory: torch.Tensor) -> None:
    """Copy the bucket's tensors into `memory` (uint8, at least `bucket.nbytes`). Gaps become zero."""
    ends = [entry.offset for entry in bucket.entries[1:]] + [bucket.nbytes]
    with torch.no_grad():
        for entry, tensor, end in zip(bucket.entries, bucket.tensors, ends, strict=True):
            view = tensor_in(memory, entry)
            view.copy_(tensor)
            memory[entry.offset + view.numel() * view.element_size() : end].zero_()


def tensor_in(memory: torch.Tensor, entry: BucketEntry) -> torch.Tensor:
    """Return the tensor of `entry` as a view of `memory` (uint8)."""
    dtype = getattr(torch, entry.dtype)
    size = dtype.itemsize
    for length in entry.shape:
        size *= length
    return memory[entry.offset : entry.offset + size].view(dtype).view(entry.shape)


def describe(entries: list[BucketEntry]) -> str:
    """Return canonical text of a bucket's entries, for `parse`."""
    return json.dumps([[e.name, e.dtype, list(e.shape), e.offset] for e in entries], separators=(",", ":"))


def parse(text: str) -> list[BucketEntry]:
    """Read the entries that `describe` wrote."""
    rows: list[Any] = json.loads(text)
    return [BucketEntry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in rows]


def describe_bucket(number: int, names: Sequence[str]) -> str:
    """Return a bucket's description for messages."""
    return f"bucket {number} ({abbreviate_names(names)})"
