"""Comparison of two runs: mean absolute error over common steps, and throughput ratio. Pure functions.

Both follow verl's documents. The mean absolute error of N steps is sum |a_i - b_i| / N, printed in percent
(an error of 1 in reward is 100 %). The throughput ratio is the mean throughput over the first steps of A divided by B's.
docs/compare.md has the formulas with a worked example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Series = Mapping[int, float]  # step -> value

DIGITS = 9  # decimals of a comparison with a bound: 0.54 - 0.5 is 0.04000000000000004 in binary


class NothingInCommon(ValueError):
    """Two curves have no step in common."""


@dataclass(frozen=True)
class Accuracy:
    """Differences between two curves over their common steps.

    ``steps`` is the number of common steps in which both values are finite; the figures are means over these, and NaN
    if there are none. ``first`` and ``last`` are the smallest and largest common step. ``relative`` is the error divided
    by the mean of |b|, NaN if that mean is 0.
    """

    steps: int
    first: int
    last: int
    error: float  # mean of |a - b|
    bias: float  # mean of a - b
    largest: float  # maximum of |a - b|
    largest_step: int | None
    relative: float
    not_finite_a: int  # common steps in which a is NaN or infinite
    not_finite_b: int
    only_a: int  # steps that b lacks
    only_b: int

    def within(self, bound: float) -> bool:
        """Return True if the error is at most `bound` and every common step is finite."""
        if self.not_finite_a or self.not_finite_b:
            return False
        return round(self.error, DIGITS) <= round(bound, DIGITS)


@dataclass(frozen=True)
class Throughput:
    """Mean throughput over the first steps of each run, and their ratio (a / b), NaN if undefined."""

    steps_a: tuple[int, ...]
    steps_b: tuple[int, ...]
    mean_a: float
    mean_b: float
    ratio: float

    def within(self, least: float) -> bool:
        """Return True if the ratio is defined and at least `least`."""
        return round(self.ratio, DIGITS) >= round(least, DIGITS)


def between(series: Series, first: int | None, last: int | None) -> dict[int, float]:
    """Return the steps of `series` from `first` to `last`, both included. None leaves that end open."""
    low = -math.inf if first is None else first
    high = math.inf if last is None else last
    return {step: series[step] for step in sorted(series) if low <= step <= high}


def accuracy(a: Series, b: Series) -> Accuracy:
    """Compare `a` with `b`. Raises NothingInCommon, with both ranges of steps, if they share no step."""
    common = sorted(a.keys() & b.keys())
    if not common:
        raise NothingInCommon(f"no step in common: A has {span(a)}, B has {span(b)}")
    finite = [step for step in common if math.isfinite(a[step]) and math.isfinite(b[step])]
    gaps = {step: a[step] - b[step] for step in finite}
    error = mean([abs(gap) for gap in gaps.values()])
    size = mean([abs(b[step]) for step in finite])
    farthest = max(finite, key=lambda step: abs(gaps[step]), default=None)
    return Accuracy(
        steps=len(finite),
        first=common[0],
        last=common[-1],
        error=error,
        bias=mean(list(gaps.values())),
        largest=math.nan if farthest is None else abs(gaps[farthest]),
        largest_step=farthest,
        relative=error / size if size > 0 else math.nan,
        not_finite_a=sum(not math.isfinite(a[step]) for step in common),
        not_finite_b=sum(not math.isfinite(b[step]) for step in common),
        only_a=len(a) - len(common),
        only_b=len(b) - len(common),
    )


def throughput(a: Series, b: Series, steps: int) -> Throughput:
    """Compare the mean throughput over the first `steps` steps of each run (all steps of a shorter run)."""
    steps_a, steps_b = tuple(sorted(a)[:steps]), tuple(sorted(b)[:steps])
    mean_a, mean_b = mean([a[step] for step in steps_a]), mean([b[step] for step in steps_b])
    defined = math.isfinite(mean_a) and math.isfinite(mean_b) and mean_b > 0
    return Throughput(steps_a, steps_b, mean_a, mean_b, mean_a / mean_b if defined else math.nan)


def errors(a: Series, b: Series) -> tuple[dict[int, float], dict[int, float]]:
    """Return |a - b| for each common step, and its running mean. Steps that are not finite are NaN and not averaged."""
    gaps = {step: abs(a[step] - b[step]) for step in sorted(a.keys() & b.keys())}
    gaps = {step: gap if math.isfinite(gap) else math.nan for step, gap in gaps.items()}
    means, total, count = {}, 0.0, 0
    for step, gap in gaps.items():
        if not math.isnan(gap):
            total, count = total + gap, count + 1
        means[step] = total / count if count else math.nan
    return gaps, means


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; NaN for an empty sequence."""
    return sum(values) / len(values) if values else math.nan


def span(steps: Series | Sequence[int]) -> str:
    """Describe the range of steps: ``steps 1 to 40``, ``step 7`` or ``none``."""
    if not steps:
        return "none"
    first, last = min(steps), max(steps)
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


_BARS = "▁▂▃▄▅▆▇█"


def spark(series: Series, steps: Sequence[int], low: float, high: float, width: int) -> str:
    """Draw `series` at `steps` as at most `width` bars between `low` and `high`. A bar is the mean of several steps.

    ``×`` marks a value that is not finite, a space steps that the series lacks.
    """
    width = min(width, len(steps))
    drawn = ""
    for bar in range(width):
        part = steps[bar * len(steps) // width : (bar + 1) * len(steps) // width]
        values = [series[step] for step in part if step in series]
        if not values:
            drawn += " "
        elif not all(math.isfinite(value) for value in values):
            drawn += "×"
        else:
            height = (mean(values) - low) / (high - low) if high > low else 0.0
            drawn += _BARS[min(len(_BARS) - 1, max(0, int(height * len(_BARS))))]
    return drawn
