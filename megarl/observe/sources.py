"""Tables of data sources for the console and the report, computed from lines of metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.observe.page.curves import thin
from megarl.rollout.metrics import of_evaluated, of_sampled, source_of

MAX_STEPS = 200  # steps with tables in the report
MAX_ROWS = 100  # rows of one table
MAX_CURVES = 8  # data sources with curves in the report

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """One figure of each data source.

    ``how``: a Python format. ``fault``: the figure counts failures. A count of 0 is an empty cell, and a column of empty
    cells is left out.
    """

    figure: str
    label: str
    how: str = "{:,.0f}"
    fault: bool = False


SAMPLED = (
    Column("samples", "samples"),
    Column("rewards/mean", "reward", "{:.3f}"),
    Column("accuracy", "accuracy", "{:.1%}"),
    Column("response_length/mean", "length"),
    Column("response_length/max", "longest"),
    Column("truncated", "cut", "{:.1%}"),
    Column("groups_tried", "groups"),
    Column("groups_accepted", "trained on"),
    Column("scoring_retries", "scored again", fault=True),
    Column("scoring_failed", "not scored", fault=True),
    Column("scoring_timeouts", "time-outs", fault=True),
    Column("scoring_crashes", "crashes", fault=True),
    Column("scoring_errors", "errors", fault=True),
    Column("scoring_unavailable", "unavailable", fault=True),
)
TOOLS = (
    Column("agent/turns/mean", "turns", "{:.1f}"),
    Column("agent/turns/max", "most turns"),
    Column("agent/calls/mean", "calls", "{:.1f}"),
    Column("agent/tool_seconds/mean", "tool s", "{:.2f}"),
    Column("agent/tool_seconds/max", "longest s", "{:.1f}"),
    Column("agent/ended/turns", "out of turns", "{:.1%}", fault=True),
    Column("agent/ended/tool_time", "out of tool time", "{:.1%}", fault=True),
    Column("agent/failed_calls", "failed calls", fault=True),
    Column("agent/tool_timeouts", "tool time-outs", fault=True),
)
_EVALUATED_LAST = (
    Column("greedy", "greedy", "{:.1%}"),
    Column("rewards/mean", "reward", "{:.3f}"),
    Column("response_length/mean", "length"),
    Column("response_length/clip_ratio", "cut", "{:.1%}"),
    Column("scoring_failed", "not scored", fault=True),
)
# Columns on a terminal, which is narrow; the report has all columns.
_BRIEF = {"samples", "rewards/mean", "accuracy", "response_length/mean", "truncated", "agent/turns/mean"}
_BRIEF |= {"scoring_failed", "scoring_timeouts", "scoring_crashes", "scoring_errors", "scoring_unavailable"}
_BRIEF |= {"agent/failed_calls", "agent/tool_timeouts"}
# Failures that print the lines of data sources even if there is only one source.
_TROUBLE = ("scoring_failed", "agent/tool_timeouts")


@dataclass(frozen=True)
class SourceTable:
    """A table of data sources, with formatted cells.

    ``rows``: (name of the source, cells). ``faults``: True for each column that counts failures, where 0 is an empty cell.
    ``left_out``: number of sources beyond the limit.
    """

    head: list[str]
    faults: list[bool]
    rows: list[tuple[str, list[str]]]
    left_out: int


def brief_table(metrics: Figures, limit: int) -> SourceTable:
    """Return the table of a step's samples for a terminal: few columns, at most `limit` sources."""
    columns = [column for column in (*SAMPLED, *TOOLS) if column.figure in _BRIEF]
    return _table(of_sampled(metrics), columns, limit)


def needs_source_lines(metrics: Figures) -> bool:
    """Return True if a log prints lines of the data sources: several sources, or failures."""
    return len(of_sampled(metrics)) > 1 or has_trouble(metrics)


def has_trouble(metrics: Figures) -> bool:
    """Return True if samples of a source could not be scored in this step, or its tools timed out."""
    return any(figures.get(name) for figures in of_sampled(metrics).values() for name in _TROUBLE)


def report_tables(lines: Sequence[Figures]) -> dict[str, Any]:
    """Return the tables of data sources for the page, by step.

    At most `MAX_STEPS` steps have tables, including the steps with the most samples that could not be scored.
    """
    steps_with_sources = [(line, of_sampled(line), of_evaluated(line)) for line in lines]
    steps_with_sources = [row for row in steps_with_sources if row[1] or row[2]]
    not_scored = [
        sum(figures.get("scoring_failed", 0.0) for figures in sampled.values()) for _, sampled, _ in steps_with_sources
    ]
    steps = []
    for index in thin(not_scored, MAX_STEPS):
        line, sampled, evaluated = steps_with_sources[index]
        steps.append(
            {
                "step": int(line["step"]),
                "not_scored": int(not_scored[index]),
                "tables": [
                    {"title": title, **vars(table)}
                    for title, table in (
                        ("Sampled", _table(sampled, SAMPLED, MAX_ROWS)),
                        ("Agent loops", _table(sampled, TOOLS, MAX_ROWS)),
                        ("Evaluation", _table(evaluated, _evaluated_columns(evaluated), MAX_ROWS)),
                    )
                    if table.head and table.rows
                ],
            }
        )
    return {"steps": steps, "of": len(steps_with_sources)}


def limit_sources(lines: Sequence[Figures], names: Sequence[str]) -> tuple[list[str], str]:
    """Return `names` with the metrics of at most `MAX_CURVES` data sources, and a note about the sources left out.

    The sources with the most samples over all steps are kept; ties are broken by the number of evaluation problems.
    lines: metrics of each step; the counts of samples and problems are read.
    """
    weights = dict.fromkeys(filter(None, map(source_of, names)), 0.0)
    for line in lines:
        for figures_of, figure, weight in ((of_sampled, "samples", 1.0), (of_evaluated, "problems", 1e-6)):
            for source, figures in figures_of(line).items():
                weights[source] = weights.get(source, 0.0) + weight * figures.get(figure, 0.0)
    if len(weights) <= MAX_CURVES:
        return list(names), ""
    kept = {None, *sorted(weights, key=lambda source: (-weights[source], source))[:MAX_CURVES]}
    note = f"Curves show the {MAX_CURVES} largest of {len(weights):,} data sources; metrics.jsonl has all."
    return [name for name in names if source_of(name) in kept], note


def _table(sources: Mapping[str, Figures], columns: Sequence[Column], limit: int) -> SourceTable:
    """Build the table of at most `limit` sources: first sources with samples that were not scored, then the largest."""

    def weight(source: str) -> tuple[float, float]:
        figures = sources[source]
        return figures.get("scoring_failed", 0.0), figures.get("samples", figures.get("problems", 0.0))

    chosen = sorted(sorted(sources, key=weight, reverse=True)[:limit])
    shown = [column for column in columns if _is_shown(column, [sources[source] for source in chosen])]
    rows = [(source, [_cell(sources[source], column) for column in shown]) for source in chosen]
    head, faults = [column.label for column in shown], [column.fault for column in shown]
    return SourceTable(head, faults, rows, len(sources) - len(chosen))


def _is_shown(column: Column, rows: Sequence[Figures]) -> bool:
    values = [figures[column.figure] for figures in rows if column.figure in figures]
    return any(values) if column.fault else bool(values)


def _cell(figures: Figures, column: Column) -> str:
    value = figures.get(column.figure)
    if column.fault and not value:
        return ""
    return "–" if value is None else column.how.format(value)


def _evaluated_columns(sources: Mapping[str, Figures]) -> list[Column]:
    """Return the columns of the evaluation table: pass@k, then maj@k, by increasing k, between fixed columns."""
    names = {name for figures in sources.values() for name in figures if "@" in name}
    ordered = sorted(names, key=lambda name: (not name.startswith("pass"), int(name.partition("@")[2])))
    accuracies = [Column(name, name, "{:.1%}") for name in ordered]
    return [Column("problems", "problems"), *accuracies, *_EVALUATED_LAST]
