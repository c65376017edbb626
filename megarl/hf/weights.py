"""The weights of a Hugging Face directory, as far as the headers of its files tell of them: no tensor is read."""

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
CONVERSION = "conversion.megarl.json"  # in a folder that `megarl convert-weights` writes: what of which source is there
_MOST_HEADER = 100 << 20  # bytes
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    name: str
    elements: int


def tensors_of(file: Path) -> list[Tensor]:
    """The tensors of one file. Raises ValueError where it is cut short, or no safetensors file; OSError where it cannot be
    read."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(_MOST_HEADER, size):
            raise ValueError(f"{file.name} is no safetensors file, or cut short: it has {size} bytes")
        try:
            header = json.loads(opened.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            found = [Tensor(name, math.prod(entry["shape"])) for name, entry in entries.items()]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file.name} is no safetensors file: its header cannot be read") from error
    if size < 8 + length + end:
        raise ValueError(f"{file.name} is cut short: it has {size} bytes of {8 + length + end}")
    return found


def sizes(directory: Path) -> list[int]:
    """Elements of each tensor; of files that cannot be read, none."""

    def readable() -> Iterator[Tensor]:
        for file in sorted(directory.glob("*.safetensors")):
            try:
                yield from tensors_of(file)
            except (OSError, ValueError):
                continue

    return [tensor.elements for tensor in readable()]


def find_fault(directory: Path, layers: int) -> str | None:
    """What is wrong with the weights of a model with so many layers; None: nothing that headers tell.

    A file is missing or cut short, a tensor is not where the index says, or a layer has none.
    """
    files = {file.name: file for file in directory.glob("*.safetensors")}
    if not files:
        return "it holds no *.safetensors"
    try:
        placed = read_index(directory, files)
        there = {
            name: {tensor.name for tensor in tensors_of(files[name])} for name in sorted({*placed.values()} or files)
        }
    except (OSError, ValueError) as error:
        return str(error)
    for tensor, file in placed.items():
        if tensor not in there[file]:
            return f"{INDEX} says that {tensor} is in {file}, which has no such tensor"
    used = {*placed.values()} or {*files}
    names = {tensor for file in used for tensor in there[file]}
    unplaced = sorted(name for name in names - placed.keys() if name.endswith((".weight", ".bias")))
    if placed and unplaced:
        return f"{INDEX} leaves out {unplaced[0]}{_others(len(unplaced))}, which its files hold"
    numbers = {int(found[1]) for name in placed or names if (found := _LAYER.search(name))}
    missing = sorted({*range(layers)} - numbers)
    return f"its files have no weights of layer {missing[0]}{_others(len(missing))} of {layers}" if missing else None


def read_index(directory: Path, files: Collection[str]) -> dict[str, str]:
    """Return the file of each tensor by the index of `directory`, which holds `files`; empty where it has no index.

    Raises ValueError where the index cannot be read or names a file that is absent.
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


def _others(count: int) -> str:
    return f" and {count - 1} others" if count > 1 else ""
