"""The metrics of a run as columns, which grow with metrics.jsonl, and curves of them."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from megarl.observe.metrics import restore_non_finite
from megarl.observe.page.curves import MAX_POINTS as REPORT_POINTS
from megarl.observe.page.curves import rounded, thin
from megarl.observe.page.followed_file import FollowedFile

MAX_POINTS = 4000  # per curve; longer curves keep the smallest and the largest value of each interval
MAX_DAMAGED = 20  # damaged lines that are named


@dataclass
class _Column:
    """The values of one metric, and the line of each."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricsTable:
    """The finished steps of metrics.jsonl. `epoch` rises whenever the file has been replaced, which can change any line."""

    def __init__(self, path: Path) -> None:
        self._file = FollowedFile(path)
        self.epoch = 0
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, _Column] = {}
        self.steps = array("d")
        self.damaged: list[str] = []
        self._lines_read = 0

    def update(self) -> None:
        """Read the lines that have been written since the last call."""
        if not self._file.has_changed():
            return
        appended = self._file.read()
        if appended.replaced:
            self.epoch += 1
            self._clear()
        for line in appended.lines:
            self._add(line)

    def _add(self, line: bytes) -> None:
        self._lines_read += 1
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            if line.strip() and len(self.damaged) < MAX_DAMAGED:
                self.damaged.append(f"metrics.jsonl, line {self._lines_read}: not a line of metrics.")
            return
        number = len(self.steps)
        self.steps.append(record.pop("step"))
        for name, value in restore_non_finite(record).items():
            if isinstance(value, (int, float)):
                column = self._columns.setdefault(name, _Column())
                column.lines.append(number)
                column.values.append(value)

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def lines(self, *patterns: str) -> list[dict[str, float]]:
        """Return the lines with only the metrics that match one of `patterns`, and ``step``."""
        lines: list[dict[str, float]] = [{"step": int(step)} for step in self.steps]
        for name, column in self._columns.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                for number, value in zip(column.lines, column.values, strict=True):
                    lines[number][name] = value
        return lines

    def curve(self, name: str, *, smoothing: float, x: str, after: int) -> dict[str, Any] | None:
        """Return the curve of a metric after line `after`; None without a point there.

        ``x``: steps, or hours of the steps so far (`x` is "hours"). ``y``: values, with gaps (None) for non-finite ones.
        ``smooth``: their running mean, without smoothing absent; see `smoothed`. A curve with more than `MAX_POINTS`
        is thinned and comes whole, as ``thinned`` says.
        """
        column = self._columns.get(name)
        if column is None:
            return None
        values = np.frombuffer(column.values, dtype=np.float64)
        lines = np.frombuffer(column.lines, dtype=np.int64)
        running = smoothed(values, smoothing) if smoothing else None
        thinned = len(values) > MAX_POINTS
        kept = thin(values.tolist(), MAX_POINTS) if thinned else np.flatnonzero(lines > after).tolist()
        if not kept:
            return None
        places = (self.hours() if x == "hours" else np.frombuffer(self.steps, dtype=np.float64))[lines]
        curve: dict[str, Any] = {
            "x": [rounded(places[i]) for i in kept] if x == "hours" else [int(places[i]) for i in kept],
            "y": [rounded(values[i]) for i in kept],
            "thinned": thinned,
        }
        if running is not None:
            curve["smooth"] = [rounded(running[i]) for i in kept]
        return curve

    def report_curves(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the curves of the metrics `names` for report.html, each thinned to about `REPORT_POINTS` points.

        ``steps`` and ``hours`` have a value per line of which a curve has a point. ``places``: different lists of indices
        into them. ``metrics``: by name the number of its list of indices, and the values. ``between``: by
        name of a thinned curve the values that are left out, for smoothing; see `_between`.
        """
        kept = {name: self._kept(self._columns[name]) for name in names}
        used = sorted({number for _, numbers in kept.values() for number in numbers})
        index = {number: place for place, number in enumerate(used)}
        places: dict[tuple[int, ...], int] = {}
        metrics: dict[str, list[Any]] = {}
        between: dict[str, list[list[float | None]]] = {}
        for name, (points, numbers) in kept.items():
            column = self._columns[name].values
            number = places.setdefault(tuple(index[line] for line in numbers), len(places))
            metrics[name] = [number, [rounded(column[point]) for point in points]]
            if len(points) < len(column):
                between[name] = _between(np.frombuffer(column, dtype=np.float64), points)
        hours = self.hours()
        return {
            "steps": [int(self.steps[line]) for line in used],
            "hours": [rounded(hours[line]) for line in used],
            "places": list(places),
            "metrics": metrics,
            "between": between,
        }

    @staticmethod
    def _kept(column: _Column) -> tuple[list[int], list[int]]:
        points = thin(column.values, REPORT_POINTS)
        return points, [column.lines[point] for point in points]

    def hours(self) -> np.ndarray:
        """Return the sum of the steps' seconds up to each line, in hours: float64 [lines]."""
        seconds = np.zeros(len(self.steps))
        if (column := self._columns.get("timing_s/step")) is not None:
            values = np.frombuffer(column.values, dtype=np.float64)
            seconds[np.frombuffer(column.lines, dtype=np.int64)] = np.where(np.isfinite(values), values, 0.0)
        return np.cumsum(seconds) / 3600


def _between(values: np.ndarray, points: Sequence[int]) -> list[list[float | None]]:
    """Return the means, and the counts, of the finite values between each of `points` and the point before it."""
    means: list[float | None] = []
    counts: list[float | None] = []
    for before, point in itertools.pairwise([-1, *points]):
        skipped = values[before + 1 : point]
        finite = skipped[np.isfinite(skipped)]
        means.append(rounded(finite.mean()) if len(finite) else None)
        counts.append(len(finite))
    return [means, counts]


def smoothed(values: Sequence[float] | np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential running mean of `values`: each value has `weight` times the influence of the next.

    The mean starts at the first value (bias-corrected), and skips non-finite values.
    """
    mean, total = 0.0, 0.0
    out = np.empty(len(values))
    for i, value in enumerate(itertools.chain(values)):
        if math.isfinite(value):
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out[i] = mean / total if total else math.nan
    return out
