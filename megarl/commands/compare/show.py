"""Output of a comparison: figures and curves in the console, and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.commands.compare.measures import Series, errors, spark
from megarl.commands.compare.rules import THROUGHPUT, Comparison
from megarl.observe.console import short
from megarl.observe.page.bundle import page_with_charts
from megarl.observe.page.curves import MAX_POINTS, series

_MORE_METRICS = (  # further charts, if both runs logged the metric: they help to explain a difference
    ("Response length", "response_length/mean"),
    ("Entropy", "actor/entropy"),
    ("Gradient norm", "actor/grad_norm"),
    ("Policy loss", "actor/pg_loss"),
    ("KL to the reference", "actor/kl_loss"),
)


def figures(result: Comparison) -> list[dict[str, Any]]:
    """Return the rows of the summary: label, value, detail, and verdict (None for a figure without a bound)."""
    error = result.accuracy
    rows = [
        _figure(
            "Mean absolute error",
            percent(error.error),
            f"mean of |A − B| over {error.steps:,} steps; at most {percent(result.bound)}",
            result.accurate,
        ),
        _figure("Relative error", percent(error.relative), "relative to the mean of |B|; not part of the rule"),
        _figure("Mean of A − B", signed(error.bias), "in the metric's unit"),
        _figure(
            "Largest error",
            percent(error.largest),
            "no finite step" if error.largest_step is None else f"at step {error.largest_step:,}",
        ),
    ]
    if rate := result.throughput:
        least = result.min_throughput_ratio
        detail = f"{short(rate.mean_a)} / {short(rate.mean_b)} tokens/s/device"
        if rate.steps_a == rate.steps_b:
            detail += f", first {len(rate.steps_a)} steps"
        detail += "" if least is None else f"; at least {least:g}"
        rows.append(_figure("Throughput ratio", f"{rate.ratio:.3f}", detail, result.fast))
    return rows


def _figure(label: str, value: str, detail: str, verdict: bool | None = None) -> dict[str, Any]:
    return {"label": label, "value": value, "detail": detail, "verdict": verdict}


def percent(value: float) -> str:
    """Format a share as a percentage: ``0.0375 -> "3.75 %"``."""
    return "not finite" if not math.isfinite(value) else f"{100 * value:.3g} %"


def signed(value: float) -> str:
    return "not finite" if not math.isfinite(value) else f"{value:+.3g}"


def show(result: Comparison, console: Console) -> None:
    """Print the two runs, the figures with verdicts, the curves, the notes and the overall verdict."""
    for name, side in (("A", result.a), ("B", result.b)):
        console.print(
            Text.assemble((f"{name}  ", "bold"), str(side.log.path), (f"  {side.log.kind}, {side.metric}", "dim"))
        )
    console.print()
    table = Table.grid(padding=(0, 2))
    for figure in figures(result):
        verdict = {None: Text(""), True: Text("within", "green"), False: Text("outside", "bold red")}[figure["verdict"]]
        table.add_row(figure["label"], Text(figure["value"], "bold"), verdict, Text(figure["detail"], "dim"))
    console.print(table)
    console.print()
    _show_curves(result, console)
    for note in result.notes:
        console.print(Text("note  ", "yellow") + Text(note))
    console.print(Text("within the rules", "bold green") if result.within else Text("outside the rules", "bold red"))


def _show_curves(result: Comparison, console: Console) -> None:
    width = max(10, min(72, console.width - 26))
    gaps, _ = errors(result.a.curve, result.b.curve)
    for title, curves in (
        (result.a.metric, {"A": result.a.curve, "B": result.b.curve}),
        ("|A − B|", {"": gaps}),
        (THROUGHPUT, {"A": result.a.throughput, "B": result.b.throughput}),
    ):
        steps = sorted({step for curve in curves.values() for step in curve})
        finite = [value for curve in curves.values() for value in curve.values() if math.isfinite(value)]
        if not finite:
            continue
        low, high = (0.0 if title == "|A − B|" else min(finite)), max(finite)
        heading = f"{title}, steps {steps[0]:,} to {steps[-1]:,}, {low:.4g} to {high:.4g}"
        console.print(Text(heading, "dim"), soft_wrap=True)
        for name, curve in curves.items():
            style = {"A": "blue", "B": "yellow"}.get(name, "magenta")
            console.print(Text(f"{name:2}") + Text(spark(curve, steps, low, high, width), style), soft_wrap=True)
        console.print()


def render(result: Comparison) -> str:
    """Return the HTML page. It loads nothing from the network."""
    curves, charts = _charts(result)
    facts = [
        ("A", f"{result.a.log.path} ({result.a.log.kind})"),
        ("B", f"{result.b.log.path} ({result.b.log.kind})"),
        ("Compared", ", ".join(dict.fromkeys((result.a.metric, result.b.metric)))),
        ("Steps", f"{result.accuracy.first:,} to {result.accuracy.last:,}"),
    ]
    longest = max(len(side.curve) for side in (result.a, result.b))
    return page_with_charts(
        "compare.html.j2",
        {"series": curves, "charts": charts},
        "compare.js",
        title=f"{_title(result)}: A against B",
        within=result.within,
        facts=facts,
        figures=figures(result),
        notes=result.notes,
        thinned=longest > MAX_POINTS,
    )


def _charts(result: Comparison) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (curves by name, charts) in the format of the page's script."""
    curves: dict[str, Any] = {}
    charts: list[dict[str, Any]] = []

    def chart(title: str, note: str, lines: Mapping[str, Series], tick: str = "", zero: bool = False) -> None:
        drawn = []
        for label, line in lines.items():
            key = f"{title} {label}"
            curves.update(series([{"step": step, key: line[step]} for step in sorted(line)]))
            drawn.append((key, label))
        charts.append(
            {"title": title, "note": note, "series": drawn, "band": None, "tick": tick, "log": False, "zero": zero}
        )

    a, b = result.a, result.b
    chart(
        _title(result),
        a.metric if a.metric == b.metric else f"{a.metric} of A, {b.metric} of B",
        {"A": a.curve, "B": b.curve},
    )
    gaps, means = errors(a.curve, b.curve)
    bound = dict.fromkeys(gaps, result.bound)
    chart(
        "Absolute error",
        "|A − B|, its running mean, and the bound of the mean.",
        {"step": gaps, "running mean": means, "bound": bound},
        ".1%",
        zero=True,
    )
    if result.throughput:
        chart("Throughput", "Tokens per second and device.", {"A": a.throughput, "B": b.throughput})
    for title, metric in _MORE_METRICS:
        if metric in a.log.metrics and metric in b.log.metrics and metric not in (a.metric, b.metric):
            chart(title, metric, {"A": a.log.metrics[metric], "B": b.log.metrics[metric]})
    return curves, charts


def _title(result: Comparison) -> str:
    return result.rule if "/" in result.rule else result.rule.capitalize()
