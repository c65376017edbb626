"""Terminal output during a run: a live display, log lines, only warnings and the end, or JSON events."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TextIO

from megarl.observe.console.base import Console
from megarl.observe.console.figures import clock, short, short_seconds
from megarl.observe.console.json_events import JsonConsole
from megarl.observe.console.live import LiveConsole
from megarl.observe.console.plain import PlainConsole, QuietConsole
from megarl.observe.stdout import output
from megarl.recipe.schema import Recipe

__all__ = ["Console", "clock", "make_console", "short", "short_seconds"]


def make_console(
    recipe: Recipe, steps_done: int, total_steps: int, stream: TextIO | None = None, *, run: Path | None = None
) -> Console:
    """Return the console that ``observe.console`` selects, on `stream` (default: `output`).

    auto: live on a terminal, otherwise plain. run: the run's directory, for the events of ``json``; None: runs_dir/name.
    """
    stream = stream or output()
    # Half a surrogate pair in a sample, or another encoding, must not end the run.
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    kind = recipe.observe.console
    if kind == "json":
        return JsonConsole(recipe.name, run or Path(recipe.runs_dir) / recipe.name, steps_done, total_steps, stream)
    if kind == "quiet":
        return QuietConsole(steps_done, total_steps, stream)
    live = kind == "live" or (kind == "auto" and stream.isatty())
    return (LiveConsole if live else PlainConsole)(recipe.name, steps_done, total_steps, stream)
