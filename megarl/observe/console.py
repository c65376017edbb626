"""Terminal output during a run: a live display, or one line per step."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol, TextIO

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.errors import pluralize
from megarl.observe.sources import brief_table, has_trouble, needs_source_lines
from megarl.recipe.schema import Recipe
from megarl.rollout.metrics import source_of

_SOURCES_SHOWN = 8
_NOT_PHASES = ("timing_s/step",)
_EVERY_STEP_UP_TO = 100  # runs of at most this many steps print one line per step
_LINES = 20  # approximate number of lines of a longer run
_SECONDS_BETWEEN_LINES = 30.0  # upper limit, for any interval


class Console(Protocol):
    """Shows a run. All calls come from the controller."""

    def phase(self, name: str | None) -> None:
        """Show `name` as the running phase; None: no phase is running."""

    def reached(self, text: str, seconds: float) -> None:
        """Show the progress of the start; `seconds`: time since its beginning."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step; 0 is the evaluation before the first step."""

    def notice(self, text: str, warning: bool) -> None:
        """Print a message that stays on the screen."""

    def close(self) -> None:
        """Restore the terminal. Later calls do nothing."""


def make_console(recipe: Recipe, steps_done: int, total_steps: int, stream: TextIO | None = None) -> Console:
    """Return the console that ``observe.console`` selects, on `stream` (default: stdout).

    auto: live on a terminal, otherwise plain.
    """
    stream = stream or sys.stdout
    kind = recipe.observe.console
    live = kind == "live" or (kind == "auto" and stream.isatty())
    return (LiveConsole if live else PlainConsole)(recipe.name, steps_done, total_steps, stream)


class Pace:
    """Estimates the remaining time from the last 20 steps."""

    def __init__(self, steps_done: int, total_steps: int) -> None:
        self.step, self.total = steps_done, total_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def done(self, step: int, seconds: float) -> None:
        """Record a finished step. Step 0 (the evaluation before training) does not count towards the step time."""
        self.step = step
        if step:
            self._seconds.append(seconds)

    @property
    def current(self) -> int:
        """The running step, counted from 1; after the end, the last step."""
        return min(self.step + 1, self.total)

    def left(self) -> float | None:
        """Return the estimated seconds until the run ends; None before the first step is done."""
        if not self._seconds:
            return None
        return (self.total - self.step) * sum(self._seconds) / len(self._seconds)


def clock(seconds: float | None) -> str:
    """``75 -> "1:15"``, ``3700 -> "1:01:40"``, ``100000 -> "1d 3:46:40"``, ``None -> "-"``."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    day = f"{days}d " if days else ""
    return f"{day}{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def short_seconds(seconds: float) -> str:
    """Format seconds with one decimal; times below half a second with two."""
    return f"{seconds:.1f}" if seconds >= 0.5 else f"{seconds:.2f}"


def short(value: float) -> str:
    """Format with at most four significant digits, and k / M / G for large numbers."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


_GAP_BY_LAG = "rollout/logprob_gap_by_lag/"
_TRAINED_REWARD, _SAMPLED_REWARD = "critic/rewards/mean", "rollout/rewards/mean"

# (label, metric, format) for reinforcement learning
_COLUMNS = (
    ("length", "response_length/mean", "{:.0f}"),
    ("cut", "response_length/clip_ratio", "{:.0%}"),
    ("turns", "agent/turns/mean", "{:.1f}"),
    ("loss", "actor/pg_loss", "{:.3g}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.3g}"),
    ("gap", "rollout/logprob_gap_mean", "{:.1e}"),
    ("value loss", "critic/vf_loss", "{:.3g}"),
)
# The same for SFT and DPO, which have no rewards.
_COLUMNS_WITHOUT_REWARD = (
    ("loss", "actor/loss", "{:.4g}"),
    ("chosen ahead", "actor/dpo_accuracy", "{:.0%}"),
    ("margin", "actor/dpo_margin", "{:.3g}"),
    ("grad", "actor/grad_norm", "{:.3g}"),
    ("lr", "actor/lr", "{:.3g}"),
    ("length", "response_length/mean", "{:.0f}"),
)


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, text) of the step's key figures, evaluations first. Figures of single data sources are left out.

    `reward` is the mean over all samples. Dynamic sampling leaves groups out of the training batch: `trained on` is the
    mean over the batch, and is shown only if it differs. If engines sampled ahead, `lag` is the mean over tokens, and `gap` that
    of the smallest lag: the gap of larger ones contains the policy's change.
    """
    pairs = [
        (name, f"{value:.3f}")
        for name, value in sorted(metrics.items())
        if name.startswith("eval/") and source_of(name) is None
    ]
    rewards = [f"{metrics[name]:.3f}" for name in (_SAMPLED_REWARD, _TRAINED_REWARD) if name in metrics]
    pairs += zip(("reward", "trained on"), dict.fromkeys(rewards), strict=False)
    columns = _COLUMNS if rewards else _COLUMNS_WITHOUT_REWARD
    shown = [(label, form.format(metrics[name])) for label, name, form in columns if name in metrics]
    lags = sorted(int(name.removeprefix(_GAP_BY_LAG)) for name in metrics if name.startswith(_GAP_BY_LAG))
    if lags:
        gap = (
            ("lag", f"{metrics['rollout/staleness_mean']:.1f}"),
            (f"gap at lag {lags[0]}", f"{metrics[f'{_GAP_BY_LAG}{lags[0]}']:.1e}"),
        )
        shown = [pair for each in shown for pair in (gap if each[0] == "gap" else (each,))]
    pairs += shown
    if "perf/throughput" in metrics:
        pairs.append(("tok/s/device", short(metrics["perf/throughput"])))
    return pairs


def phase_times(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (phase, seconds) of one step, longest first. Phases below a hundredth of the step are left out."""
    least = metrics.get("timing_s/step", 0.0) / 100
    times = [
        (name.removeprefix("timing_s/"), seconds)
        for name, seconds in metrics.items()
        if name.startswith("timing_s/") and name not in _NOT_PHASES and seconds >= least
    ]
    return sorted(times, key=lambda item: -item[1])


def line_interval(steps: int) -> int:
    """Return the number of steps between two lines in a log: 1 up to 100 steps, otherwise about a twentieth of `steps`,
    rounded.

    Example: 1200 steps -> 50.
    """
    if steps <= _EVERY_STEP_UP_TO:
        return 1
    power = 10 ** (len(str(steps // _LINES)) - 1)
    return max(size * power for size in (1, 2, 5) if size * power <= max(steps // _LINES, 1))


def source_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return one line per data source: ``  openai/gsm8k: samples 64 | reward 0.512 | ...``."""
    table = brief_table(metrics, _SOURCES_SHOWN)
    lines = []
    for source, cells in table.rows:
        parts = [f"{label} {cell}" for label, cell in zip(table.head, cells, strict=True) if cell]
        lines.append(f"  {source}: {' | '.join(parts)}")
    if table.left_out:
        lines.append(f"  and {table.left_out:,} more sources, in metrics.jsonl")
    return lines


def after(step: int) -> str:
    return f"after step {step}" if step else "before step 1"


class PlainConsole:
    """Prints one line for each part of the start and one line per step, for logs and CI.

    One line per data source follows a step's line if there are several sources or a source had failures. A run of more
    than 100 steps prints a line every `line_interval` steps, and at least every 30 seconds. The first step, the last
    step, and steps with an evaluation or with failures always have a line.
    """

    def __init__(self, name: str, steps_done: int, total_steps: int, stream: TextIO) -> None:
        self._stream = stream
        self._pace = Pace(steps_done, total_steps)
        self._every = line_interval(total_steps)
        self._shown_at = -math.inf
        if steps_done < total_steps:
            first = f"{'continues' if steps_done else 'starts'} with step {self._pace.current} of {total_steps}"
            seconds = f"{_SECONDS_BETWEEN_LINES:.0f} s"
            self._say(f"{name}: {first}" + (f"; one line every {self._every} steps or {seconds}" * (self._every > 1)))
        else:
            self._say(f"{name}: all of {pluralize(total_steps, 'step')} done")

    def phase(self, name: str | None) -> None:
        """Print nothing: each step has its line."""

    def reached(self, text: str, seconds: float) -> None:
        self._say(f"start {clock(seconds)} | {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds = metrics.get("timing_s/step", 0.0)
        self._pace.done(step, seconds)
        if not self._is_due(step, metrics):
            return
        self._shown_at = time.monotonic()
        head = f"step {step}/{self._pace.total}" if step else after(step)
        parts = [head, *(f"{label} {text}" for label, text in figures(metrics))]
        phases = " ".join(f"{phase} {short_seconds(time)}" for phase, time in phase_times(metrics)[:4])
        parts.append(f"{short_seconds(seconds)} s" + (f" ({phases})" if phases else ""))
        parts.append(f"left {clock(self._pace.left())}")
        self._say(" | ".join(parts))
        if needs_source_lines(metrics):
            for line in source_lines(metrics):
                self._say(line)

    def _is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        regular = step % self._every == 0 or step in (1, self._pace.total)
        waited = time.monotonic() - self._shown_at >= _SECONDS_BETWEEN_LINES
        evaluated = any(name.startswith("eval/") for name in metrics)
        return regular or waited or evaluated or has_trouble(metrics)

    def notice(self, text: str, warning: bool) -> None:
        self._say(f"WARNING: {text}" if warning else text)

    def close(self) -> None:
        """Do nothing: the terminal is unchanged."""

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveConsole:
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
    table = brief_table(metrics, _SOURCES_SHOWN)
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
