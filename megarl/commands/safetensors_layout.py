"""The layout of safetensors files, read and laid out without reading a tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.hf_weights import tensors_of

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E8M0": 1}


@dataclass(frozen=True)
class Entry:
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
    """The header of a file. `data`: where its data starts; `size`: bytes of the whole file."""

    entries: dict[str, Entry]
    data: int
    size: int


def read_layout(path: Path) -> Layout:
    """Read the header of `path`. Raises ValueError where the file is cut short, damaged, or holds an unknown dtype."""
    tensors_of(path)  # refuses damage
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        if entry["dtype"] not in BYTES:
            raise ValueError(f"{path.name}: {name} has the dtype {entry['dtype']}, which is not known here")
        begin, end = entry["data_offsets"]
        entries[name] = Entry(name, entry["dtype"], tuple(entry["shape"]), begin)
        if entries[name].size != end - begin:
            raise ValueError(
                f"{path.name}: {name} has {end - begin} bytes, and its shape asks for {entries[name].size}"
            )
    return Layout(entries, 8 + length, path.stat().st_size)


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, Layout]:
    """Return (header bytes, layout) of a file of `tensors`: (name, dtype, shape).

    Tensors of larger elements come first, so that each is aligned; among equal ones the order is kept.
    """
    ordered = sorted(tensors, key=lambda tensor: -BYTES[tensor[1]])
    entries: dict[str, Entry] = {}
    end = 0
    for name, dtype, shape in ordered:
        entries[name] = Entry(name, dtype, shape, end)
        end += entries[name].size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries.values():
        places = [entry.begin, entry.begin + entry.size]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, Layout(entries, 8 + len(text), 8 + len(text) + end)
