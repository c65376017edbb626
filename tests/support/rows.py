"""Read the rows of data files in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.data.rows import Row, iterate_rows


def read_rows(files: Sequence[str | Path], *layouts: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
    """Return the rows of all `files` in order; see `iterate_rows`."""
    return [row for file in files for row in iterate_rows(Path(file), *layouts, optional=optional)]
