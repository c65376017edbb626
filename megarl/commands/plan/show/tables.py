"""Console tables that fit the console's width."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

NARROWEST, WIDEST = 60, 120
PIPED = 100  # columns if standard output is not a terminal

Columns = list[list[str]]
"""A table by columns; the first cell of each column is its head."""


def console_width() -> int:
    """Return the columns of the terminal, from 60 to 120; 100 if standard output is not a terminal."""
    if not sys.stdout.isatty():
        return PIPED
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((PIPED, 24)).columns))


def width_of(columns: Columns) -> int:
    """Return the width of a table in characters."""
    return sum(max(map(len, column)) + 2 for column in columns) + 1


def transposed(columns: Columns) -> Columns:
    """Swap rows and columns."""
    return [list(row) for row in zip(*columns, strict=True)]


def head_and_rows(columns: Columns) -> dict[str, Any]:
    """Return the table for a page's template."""
    head, *rows = transposed(columns)
    return {"head": head, "rows": rows}


def fitted(columns: Columns, title: str, width: int, *, left: Sequence[str] = ()) -> Group:
    """Return tables of at most `width` characters: the columns in as few tables as possible, each with the first column.

    `left`: heads of further columns that are left-aligned.
    """
    first, rest = columns[0], columns[1:]
    tables = []
    while rest:
        count = max([1, *(n for n in range(1, len(rest) + 1) if width_of([first, *rest[:n]]) <= width)])
        tables.append(table([first, *rest[:count]], title, left))
        rest = rest[count:]
    return Group(*tables)


def upright(columns: Columns, title: str, width: int) -> Group:
    """Return `fitted`, with rows and columns swapped if the columns are too wide and there are fewer rows than columns."""
    if width_of(columns) > width and len(columns[0]) < len(columns):
        columns = transposed(columns)
    return fitted(columns, title, width)


def table(columns: Columns, title: str, left: Sequence[str]) -> Table:
    """Return one table of any width; see `fitted`."""
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, (head, *_) in enumerate(columns):
        result.add_column(head, justify="left" if number == 0 or head in left else "right", no_wrap=True)
    for row in transposed([column[1:] for column in columns]):
        result.add_row(*row)
    return result
