"""Check the weights of a Hugging Face directory by the headers of its safetensors files, without reading tensors."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.registry import nearest

INDEX = "model.safetensors.index.json"
CONVERSION = "conversion.megarl.json"  # written by `megarl convert-weights`: the source and state of the conversion
_MOST_HEADER = 100 << 20  # bytes
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def tensors_of(file: Path) -> list[Tensor]:
    """Return the tensors of one file. ValueError if it is truncated or not a safetensors file, OSError if unreadable."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(_MOST_HEADER, size):
            raise ValueError(f"{file.name} is not a safetensors file, or cut short: it has {size} bytes")
        try:
            header = json.loads(opened.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            tensors = [Tensor(name, tuple(map(int, entry["shape"]))) for name, entry in entries.items()]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file.name} is not a safetensors file: its header cannot be read") from error
    if size < 8 + length + end:
        raise ValueError(f"{file.name} is cut short: it has {size} bytes of {8 + length + end}")
    return tensors


def sizes(directory: Path) -> list[int]:
    """Return the number of elements of each tensor in the readable files; other files are skipped."""

    def readable() -> Iterator[Tensor]:
        for file in sorted(directory.glob("*.safetensors")):
            try:
                yield from tensors_of(file)
            except (OSError, ValueError):
                continue

    return [tensor.elements for tensor in readable()]


def find_fault(directory: Path, layers: int) -> str | None:
    """Return the first fault in the weights of a model with `layers` layers; None if the headers show none.

    Faults: a file is missing or truncated, a tensor is not in the file that the index names, or a layer has no tensors.
    """
    files = {file.name: file for file in directory.glob("*.safetensors")}
    if not files:
        return "it holds no *.safetensors"
    try:
        placed = read_index(directory, files)
        tensors = {
            name: {tensor.name for tensor in tensors_of(files[name])} for name in sorted({*placed.values()} or files)
        }
    except (OSError, ValueError) as error:
        return str(error)
    for tensor, file in placed.items():
        if tensor not in tensors[file]:
            return f"{INDEX} says that {tensor} is in {file}, which has no such tensor"
    names = {tensor for in_file in tensors.values() for tensor in in_file}
    unplaced = sorted(name for name in names - placed.keys() if name.endswith((".weight", ".bias")))
    if placed and unplaced:
        return f"{INDEX} leaves out {unplaced[0]}{_and_more(len(unplaced))}, which its files hold"
    numbers = {int(match[1]) for name in placed or names if (match := _LAYER.search(name))}
    missing = sorted({*range(layers)} - numbers)
    return f"its files have no weights of layer {missing[0]}{_and_more(len(missing))} of {layers}" if missing else None


def read_index(directory: Path, files: Collection[str]) -> dict[str, str]:
    """Return tensor name -> file name from the index of `directory`, which holds `files`; empty without an index.

    Raises ValueError if the index cannot be read or names a file that is absent.
    """
    index = directory / INDEX
    if not index.is_file():
        return {}
    try:
        placed = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from error
    for file in sorted({*placed.values()}):
        if file not in files:
            near = nearest(file, files)
            raise ValueError(f"{INDEX} names {file}, which is not there{f' (there is {near})' if near else ''}")
    return placed


def _and_more(count: int) -> str:
    return f" and {count - 1} others" if count > 1 else ""
