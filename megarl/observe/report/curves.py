"""Curves for report.html: every metric's, thinned so that nothing of note is lost. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

MAX_POINTS = 600  # of one curve


def series(lines: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float | None]]]:
    """Every metric's curve, thinned to about `MAX_POINTS`; what is not finite is a gap (None)."""
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
    """Indices to keep of a curve: the least and the greatest of each stretch, and both ends.

    So a single spike among 10,000 steps stays in the picture; of a stretch's gaps (NaN) the first is kept.
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
    """Six significant digits: a curve needs no more, and the page stays small."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
