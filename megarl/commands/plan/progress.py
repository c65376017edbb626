"""Progress of a plan: lines on standard error, since tables and JSON go to standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable

Report = Callable[[str], None]
"""Receives one line of progress. Called from several threads."""


def silent(_: str) -> None:
    """Drop a line."""


def on_stderr(line: str) -> None:
    """Print a line at once, in a single write."""
    sys.stderr.write(f"plan: {line}\n")
    sys.stderr.flush()
