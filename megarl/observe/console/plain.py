"""Log lines: one per step, or only warnings and the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TextIO

from megarl.errors import pluralize
from megarl.observe.console.base import Console
from megarl.observe.console.figures import (
    Pace,
    after,
    clock,
    figures,
    line_interval,
    phase_times,
    short_seconds,
    source_lines,
)
from megarl.observe.sources import has_trouble, needs_source_lines

_SECONDS_BETWEEN_LINES = 30.0  # upper limit, for any interval


def step_line(step: int, metrics: Mapping[str, float], pace: Pace) -> str:
    """Return the line of a step: ``step 3/30 | reward 0.5 | ... | 3.3 s (gen 1.2 ...) | left 1:35``."""
    head = f"step {step}/{pace.total}" if step else after(step)
    parts = [head, *(f"{label} {text}" for label, text in figures(metrics))]
    phases = " ".join(f"{phase} {short_seconds(time)}" for phase, time in phase_times(metrics)[:4])
    parts.append(f"{short_seconds(metrics.get('timing_s/step', 0.0))} s" + (f" ({phases})" if phases else ""))
    return " | ".join([*parts, f"left {clock(pace.left())}"])


class PlainConsole(Console):
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

    def reached(self, text: str, seconds: float) -> None:
        self._say(f"start {clock(seconds)} | {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds = metrics.get("timing_s/step", 0.0)
        self._pace.done(step, seconds)
        if not self._is_due(step, metrics):
            return
        self._shown_at = time.monotonic()
        self._say(step_line(step, metrics, self._pace))
        if needs_source_lines(metrics):
            for line in source_lines(metrics):
                self._say(line)

    def _is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        regular = step % self._every == 0 or step in (1, self._pace.total)
        waited = time.monotonic() - self._shown_at >= _SECONDS_BETWEEN_LINES
        evaluated = any(name.startswith("eval/") for name in metrics)
        return regular or waited or evaluated or has_trouble(metrics)

    def notice(self, text: str, warning: bool) -> None:
        self._say(warning_line(text) if warning else text)

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def warning_line(text: str) -> str:
    return f"WARNING: {text}"


class QuietConsole(Console):
    """Prints warnings, and at the end the line of the last step. The command prints errors and the run's files."""

    def __init__(self, steps_done: int, total_steps: int, stream: TextIO) -> None:
        self._stream = stream
        self._pace = Pace(steps_done, total_steps)
        self._last = ""  # line of the last step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.done(step, metrics.get("timing_s/step", 0.0))
        self._last = step_line(step, metrics, self._pace)

    def notice(self, text: str, warning: bool) -> None:
        if warning:
            print(warning_line(text), file=self._stream, flush=True)

    def end(self, status: str, error: str | None) -> None:
        if self._last:
            print(self._last, file=self._stream, flush=True)
