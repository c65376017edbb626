"""JSON Lines files: one record per line, readable after a crash."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def drop_torn_line(path: Path) -> bytes:
    """Truncate `path` after its last newline, dropping a line that a crash cut short. Returns the dropped bytes."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    return data[end:]


def json_line(record: dict[str, Any]) -> bytes:
    """Return `record` as one line of strict JSON. Floats round-trip exactly.

    JSON has no NaN and infinities, and null would not distinguish them. They are written as the strings "NaN",
    "Infinity" and "-Infinity" (as in protobuf's JSON mapping): every JSON parser reads the line, and ``float(...)`` in
    Python or ``Number(...)`` in JavaScript restores the number. numpy scalars and arrays become numbers and lists; other
    types are written as their ``str``.
    """
    text = json.dumps(strict(record), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def strict(value: Any) -> Any:
    """Convert `value` to types that strict JSON has; see `json_line`."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def read_lines(path: Path, most: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of `path`, one per line, and the number of invalid lines. Empty if the file is missing.

    most: lines that begin after this number of bytes are not read.
    """
    records: list[dict[str, Any]] = []
    bad = size = 0
    if not path.exists():
        return records, bad
    with path.open("rb") as file:
        for line in file:
            if most is not None and size > most:
                break
            size += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                records.append(record)
            elif line.strip():
                bad += 1
    return records, bad
