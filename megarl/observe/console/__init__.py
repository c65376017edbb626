"""Terminal output during a run: a live display, log lines, only warnings and the end, or JSON events."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO, cast

from megarl.observe.console.base import Console
from megarl.observe.console.figures import clock, short, short_seconds
from megarl.observe.console.json_events import JsonConsole
from megarl.observe.console.live import LiveConsole
from megarl.observe.console.plain import PlainConsole, QuietConsole
from megarl.observe.console.stream import ConsoleStream
from megarl.recipe.schema import Recipe

__all__ = ["Console", "ConsoleStream", "clock", "make_console", "short", "short_seconds"]


def make_console(
    recipe: Recipe, steps_done: int, total_steps: int, stream: ConsoleStream, *, run: Path | None = None
) -> Console:
    """Return the console that ``observe.console`` selects, on `stream`.

    auto: live on a terminal, otherwise plain. run: the run's directory, for the events of ``json``; None: runs_dir/name.
    """
    kind, text = recipe.observe.console, cast("TextIO", stream)
    if kind == "json":
        return JsonConsole(recipe.name, run or Path(recipe.runs_dir) / recipe.name, steps_done, total_steps, text)
    if kind == "quiet":
        return QuietConsole(steps_done, total_steps, text)
    live = kind == "live" or (kind == "auto" and stream.isatty())
    return (LiveConsole if live else PlainConsole)(recipe.name, steps_done, total_steps, text)
