"""The live display at the bottom of a terminal."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from typing import TextIO

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.errors import pluralize
from megarl.observe.console.base import Console
from megarl.observe.console.figures import SOURCES_SHOWN, Pace, after, clock, figures, phase_times
from megarl.observe.sources import brief_table


class LiveConsole(Console):
    """A display at the bottom of the terminal. Notices and other output scroll above it.

    It never hides the cursor and does not use the alternate screen, so a killed run leaves a usable terminal. In all
    other cases `close`, or the exit of the interpreter, stops it.
    """

    def __init__(self, name: str, steps_done: int, total_steps: int, stream: TextIO) -> None:
        self._name = name
        self._pace = Pace(steps_done, total_steps)
        self._metrics: dict[str, float] = {}
        self._phase: str | None = None
        self._reached = ""
        self._since = self._began = time.monotonic()
        self._warnings = 0
        # force_terminal: the recipe says `live`, or the stream is a terminal
        self._console = RichConsole(file=stream, force_terminal=True)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
        atexit.register(self.close)
        self._live.start()
        self._console.show_cursor(True)

    def phase(self, name: str | None) -> None:
        self._phase, self._since = name, time.monotonic()

    def reached(self, text: str, seconds: float) -> None:
        self._reached = f"start {clock(seconds)}: {text}"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.done(step, metrics.get("timing_s/step", 0.0))
        self._metrics, self._reached = dict(metrics), ""

    def notice(self, text: str, warning: bool) -> None:
        self._warnings += warning
        style = "bold yellow" if warning else "cyan"
        # Text, not markup: a message may contain square brackets
        self._console.print(Text("warning  " if warning else "notice   ", style=style) + Text(text, style=""))

    def close(self) -> None:
        if self._live.is_started:
            self._phase = None
            self._live.stop()
        atexit.unregister(self.close)

    def _render(self) -> RenderableType:
        pace = self._pace
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right")
        elapsed = clock(time.monotonic() - self._began)
        head.add_row(
            ProgressBar(total=max(pace.total, 1), completed=pace.step),
            f"step {pace.current}/{pace.total}  elapsed {elapsed}  left {clock(pace.left())}",
        )
        rows: list[RenderableType] = [head, self._now()]
        if self._metrics:
            rows += [Text(after(pace.step), style="dim"), _pairs(figures(self._metrics))]
            rows += _sources(self._metrics)
            rows.append(_phase_bars(self._metrics))
        title = Text(f" {self._name} ")
        warned = f" {pluralize(self._warnings, 'warning')} " if self._warnings else None
        return Panel(Group(*rows), title=title, title_align="left", subtitle=warned, border_style="dim")

    def _now(self) -> Text:
        if self._phase is None:
            return Text("between phases", style="dim")
        now = Text.assemble(("now ", "dim"), (self._phase, "bold"), f"  {clock(time.monotonic() - self._since)}")
        return now.append(f"  {self._reached}" if self._reached else "", style="dim")


def _pairs(figures: list[tuple[str, str]]) -> RenderableType:
    items = [Text.assemble((f"{label} ", "dim"), (text, "bold")) for label, text in figures]
    return Columns(items, padding=(0, 3))


def _sources(metrics: Mapping[str, float]) -> list[RenderableType]:
    """Render the data sources of the last step, with their failures."""
    table = brief_table(metrics, SOURCES_SHOWN)
    if not table.rows:
        return []
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    grid.add_column("source", overflow="ellipsis", no_wrap=True, max_width=20)
    for label, fault in zip(table.head, table.faults, strict=True):
        if not fault:
            grid.add_column(label, justify="right", no_wrap=True)
    if any(table.faults):  # failures share one column: terminals are narrow, and most failure counts are 0
        grid.add_column("")  # the only column that may wrap, so rich shrinks this one; its text is cut with an ellipsis
    for source, cells in table.rows:
        columns = list(zip(table.head, cells, table.faults, strict=True))
        failures = ", ".join(f"{label} {cell}" for label, cell, fault in columns if fault and cell)
        values = [Text(cell) for _, cell, fault in columns if not fault]
        failure_cell = Text(failures, style="yellow", no_wrap=True, overflow="ellipsis")
        grid.add_row(Text(source), *values, *([failure_cell] if any(table.faults) else []))
    more = [Text(f"and {table.left_out:,} more sources", style="dim")] if table.left_out else []
    return [grid, *more]


def _phase_bars(metrics: Mapping[str, float]) -> RenderableType:
    """Render the phases of the last step, each with a bar that shows its share of the step."""
    grid = Table.grid(padding=(0, 1))
    whole = max(metrics.get("timing_s/step", 0.0), 1e-9)
    for phase, seconds in phase_times(metrics)[:6]:
        share = min(1.0, seconds / whole)
        bar = Text("━" * max(1, round(24 * share)), style="blue")
        grid.add_row(Text(phase, style="dim"), Text(f"{seconds:.2f} s"), Text(f"{share:.0%}"), bar)
    return grid
