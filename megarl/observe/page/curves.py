"""Curves for report.html, thinned so that extreme values stay visible. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

MAX_POINTS = 600  # per curve


def series(lines: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float | None]]]:
    """Return the curve of every metric, thinned to about `MAX_POINTS`; non-finite values become gaps (None)."""
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in columns:
                columns[name] = ([], [])
            columns[name][0].append(line["step"])
            columns[name][1].append(value)
    columns.pop("step", None)
    curves: dict[str, dict[str, list[float | None]]] = {}
    for name, (xs, ys) in sorted(columns.items()):
        kept = thin(ys, MAX_POINTS)
        curves[name] = {"x": [xs[i] for i in kept], "y": [rounded(ys[i]) for i in kept]}
    return curves


def thin(ys: Sequence[float], limit: int) -> list[int]:
    """Return the indices of a curve to keep: the smallest and the largest value of each interval, and both ends.

    A single spike among 10,000 steps stays visible. Of the gaps (NaN) in an interval the first is kept.
    """
    if len(ys) <= limit:
        return list(range(len(ys)))
    values = np.asarray(ys, dtype=np.float64)
    bounds = np.linspace(0, len(ys), limit // 2 + 1).astype(int)
    kept = {0, len(ys) - 1}
    for begin, end in itertools.pairwise(bounds):
        finite = np.isfinite(values[begin:end])
        where = begin + np.flatnonzero(finite)
        if len(where):
            kept |= {int(where[values[where].argmin()]), int(where[values[where].argmax()])}
        if len(where) < end - begin:
            kept.add(int(begin + np.argmin(finite)))
    return sorted(kept)


def rounded(value: float) -> float | None:
    """Round to six significant digits, which keeps the page small; None for non-finite values."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
