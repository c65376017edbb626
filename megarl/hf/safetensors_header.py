"""Build the header of a safetensors file, for checkpoints and converted weights. Pure."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E8M0": 1}
"""Bytes per element of each safetensors data type."""


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the header's bytes, and name -> [begin, end) within the data after it, in file order.

    `tensors`: (name, data type, shape). Tensors with larger elements come first, so that each is aligned; the order is
    otherwise kept. Raises ValueError for a duplicate name.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -BYTES[tensor[1]]):
        if name in entries:
            raise ValueError(f"{name} would be written twice")
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        places[name] = begin, end
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places
