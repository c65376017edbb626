"""Layouts of safetensors files: read from headers, or computed for new files. No tensor is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.hf import safetensors_header
from megarl.hf.safetensors_header import BYTES
from megarl.hf.weights import tensors_of


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file. `begin`: its first byte, counted from the start of the file's data."""

    name: str
    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The header of a file. `data`: byte where its data starts; `size`: bytes of the file."""

    entries: dict[str, TensorEntry]
    data: int
    size: int


def read_layout(path: Path) -> Layout:
    """Read the header of `path`. Raises ValueError if the file is truncated, damaged, or has an unknown dtype."""
    tensors_of(path)  # raises ValueError for a damaged file
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        if entry["dtype"] not in BYTES:
            raise ValueError(f"{path.name}: {name} has the unsupported dtype {entry['dtype']}")
        begin, end = entry["data_offsets"]
        entries[name] = TensorEntry(name, entry["dtype"], tuple(entry["shape"]), begin)
        if entries[name].size != end - begin:
            raise ValueError(f"{path.name}: {name} has {end - begin} bytes, and its shape needs {entries[name].size}")
    return Layout(entries, 8 + length, path.stat().st_size)


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, Layout]:
    """Return (header bytes, layout) of a file with `tensors`: (name, dtype, shape).

    `safetensors_header.lay_out` determines the order.
    """
    specs = {name: (dtype, shape) for name, dtype, shape in tensors}
    header, places = safetensors_header.lay_out(((name, *spec) for name, spec in specs.items()), {"format": "pt"})
    entries = {name: TensorEntry(name, *specs[name], begin) for name, (begin, _) in places.items()}
    end = max((end for _, end in places.values()), default=0)
    return header, Layout(entries, len(header), len(header) + end)
