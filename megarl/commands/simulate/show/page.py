"""A study as one HTML page that needs no network: throughput over lag, and the tables of the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.commands.plan.show.tables import head_and_rows
from megarl.commands.plan.show.units import sized
from megarl.commands.simulate.show.console import (
    OVERSAMPLING_TITLE,
    described,
    divided,
    legend,
    named,
    oversampling_columns,
    remarks,
    schedule_columns,
    schedules_title,
    split_columns,
    splits_title,
)
from megarl.commands.simulate.study import Setting, SimulatedRun, Study
from megarl.observe.console import short_seconds
from megarl.observe.html import page

WIDTH, HEIGHT = 720, 320  # of the plot of a chart, in pixels
COLORS = 12  # that page.css.j2 defines
_ROOM = 1.08  # of an axis, relative to the largest value


class ChartPoint(NamedTuple):
    """A run in the chart, in pixels from the upper left corner."""

    x: float
    y: float
    label: str
    title: str
    best: bool


class ChartLine(NamedTuple):
    """The runs of a rule and a window, by staleness. `number`: of its colour."""

    name: str
    number: int
    points: list[ChartPoint]

    @property
    def path(self) -> str:
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


class LagChart(NamedTuple):
    """Lines, and the ticks of both axes (pixels, text)."""

    lines: list[ChartLine]
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]


def render(result: Study) -> str:
    """Return the page's HTML."""
    return page(
        "simulate.html.j2",
        study=result,
        figures=_figures(result),
        chart=draw(result),
        width=WIDTH,
        height=HEIGHT,
        recommended=described(result.best),
        remarks=remarks(result),
        schedules={"title": schedules_title(result), **head_and_rows(schedule_columns(result))},
        splits={"title": splits_title(result), **head_and_rows(split_columns(result))}
        if len(result.splits) > 1
        else None,
        oversampled={"title": OVERSAMPLING_TITLE, **head_and_rows(oversampling_columns(result))}
        if result.oversampled
        else None,
        legend=legend(result),
    )


def draw(result: Study) -> LagChart:
    """Return the chart of trained tokens per second over the mean lag of a token."""
    chosen = _schedule(result.best)
    across = max(1.0, *(run.outcome.lag_mean for run in result.runs)) * _ROOM
    up = max(run.outcome.tokens_per_second for run in result.runs) * _ROOM
    lines: dict[str, list[SimulatedRun]] = {}
    for run in result.runs:
        windowed = run.setting.rule != "drain"
        lines.setdefault(f"{run.name}, window {run.setting.window:g}" if windowed else run.name, []).append(run)

    def point(run: SimulatedRun) -> ChartPoint:
        outcome = run.outcome
        x, y = outcome.lag_mean / across * WIDTH, HEIGHT - outcome.tokens_per_second / up * HEIGHT
        return ChartPoint(x, y, f"{run.setting.max_staleness:g}", described(run), _schedule(run) == chosen)

    return LagChart(
        [
            ChartLine(name, number % COLORS, [point(run) for run in runs])
            for number, (name, runs) in enumerate(lines.items())
        ],
        [(value / across * WIDTH, f"{value:g}") for value in _ticks(across)],
        [(HEIGHT - value / up * HEIGHT, f"{value:,.10g}") for value in _ticks(up)],
    )


def _schedule(run: SimulatedRun) -> Setting:
    """Return the setting without split and over-sampling, which the chart's runs have in common and the recommended run may not."""
    return replace(run.setting, trainers=0, oversample=None)


def _ticks(most: float) -> list[float]:
    """Return round values from 0 to `most`, five to ten of them."""
    size = 10.0 ** len(str(int(most)))
    step = next(size * part for part in (0.2, 0.1, 0.05, 0.02, 0.01, 0.005) if most / (size * part) >= 4)
    return [number * step for number in range(int(most / step) + 1)]


def _figures(result: Study) -> Sequence[dict[str, str]]:
    """Return the key figures at the top of the page."""
    best, outcome = result.best, result.best.outcome
    figures = [("Schedule", named(best), divided(best) if not best.setting.colocated else "all devices in turn")]
    if best.gain is not None:
        figures.append(("Throughput", f"{best.gain:.2f} ×", "of the synchronous run on all devices"))
    figures += [
        ("Step", f"{short_seconds(outcome.step_seconds)} s", f"{3600 / outcome.step_seconds:.1f} steps an hour"),
        ("Lag of a token", f"{outcome.lag_mean:.1f}", f"versions in the mean; at most {best.schedule.max_lag}"),
        ("Idle", f"{outcome.engines_idle:.0%} / {outcome.trainers_idle:.0%}", "engines / trainers"),
        (
            "Waiting samples",
            f"{outcome.pending_samples:,}",
            f"at most, {sized(result.pending_bytes(best))} on all hosts of engines",
        ),
    ]
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in figures]
