"""Curves of metrics.jsonl while it grows: smoothing, thinning, gaps, damaged and replaced lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megarl.observe.metrics import MetricsLog
from megarl.observe.page.metrics_table import MAX_POINTS, MetricsTable, smoothed
from megarl.observe.run_dir import RunDirectory


def make_table(path: Path, values: list[float | str], seconds: float = 36.0) -> MetricsTable:
    lines = [
        json.dumps({"step": step, "a": value, "timing_s/step": seconds}) for step, value in enumerate(values, start=1)
    ]
    path.write_text("\n".join(lines) + "\n")
    table = MetricsTable(path)
    table.update()
    return table


def test_a_curve_continues_after_the_lines_that_the_page_has(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    log = MetricsLog(run_dir)
    log.write(1, {"a": 1.0})
    log.write(2, {"b": 2.0})
    table = MetricsTable(run_dir.metrics)
    table.update()
    assert table.names == ["a", "b"]
    assert table.curve("a", smoothing=0.0, x="step", after=-1) == {"x": [1], "y": [1.0], "thinned": False}
    log.write(3, {"a": 3.0})
    table.update()
    assert table.curve("a", smoothing=0.0, x="step", after=1) == {"x": [3], "y": [3.0], "thinned": False}
    assert table.curve("a", smoothing=0.0, x="step", after=2) is None
    assert table.curve("none", smoothing=0.0, x="step", after=-1) is None
    assert table.epoch == 0


def test_an_evaluation_that_joins_a_line_starts_a_new_epoch(tmp_path: Path) -> None:
    """`MetricsLog.merge` replaces the file, and `truncate_after` drops lines."""
    run_dir = RunDirectory(tmp_path)
    log = MetricsLog(run_dir)
    for step in (1, 2, 3):
        log.write(step, {"a": float(step)})
    table = MetricsTable(run_dir.metrics)
    table.update()
    log.merge(3, {"eval/pass@1": 0.5})
    table.update()
    assert table.epoch == 1 and table.curve("eval/pass@1", smoothing=0.0, x="step", after=-1) is not None
    log.truncate_after(1)
    table.update()
    assert table.epoch == 2 and list(table.steps) == [1] and "eval/pass@1" not in table.names


def test_values_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    table = make_table(tmp_path / "m", [1.0, "NaN", "Infinity", 4.0])
    curve = table.curve("a", smoothing=0.5, x="step", after=-1)
    assert curve is not None and curve["y"] == [1.0, None, None, 4.0]
    assert curve["smooth"] == [1.0, 1.0, 1.0, 3.0], "weights 1/4 for 1 and 1/2 for 4"


def test_damaged_lines_are_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a\n\n[3]\n{"a": 4}\n{"step": 5, "a": 5, "text": "x"}\n')
    table = MetricsTable(path)
    table.update()
    assert table.damaged == [f"metrics.jsonl, line {number}: not a line of metrics." for number in (2, 4, 5)]
    assert list(table.steps) == [1, 5] and table.names == ["a"]


def test_a_long_curve_keeps_its_spike_and_the_exact_running_mean(tmp_path: Path) -> None:
    values: list[float | str] = [float(i % 7) for i in range(3 * MAX_POINTS)]
    values[5000] = 1000.0
    curve = make_table(tmp_path / "m", values).curve("a", smoothing=0.9, x="step", after=10)
    assert curve is not None and curve["thinned"] and len(curve["x"]) <= MAX_POINTS + 2
    assert curve["y"][curve["x"].index(5001)] == 1000.0
    exact = smoothed(np.asarray(values, dtype=float), 0.9)
    assert curve["smooth"] == pytest.approx([exact[x - 1] for x in curve["x"]], rel=1e-5)


def test_hours_are_the_sum_of_the_steps(tmp_path: Path) -> None:
    curve = make_table(tmp_path / "m", [1.0, 2.0, 3.0]).curve("a", smoothing=0.0, x="hours", after=-1)
    assert curve is not None and curve["x"] == [0.01, 0.02, 0.03]


def test_smoothing() -> None:
    assert smoothed([2.0, 2.0, 2.0], 0.9).tolist() == pytest.approx([2.0, 2.0, 2.0]), "bias-corrected"
    assert smoothed([1.0, 3.0], 0.0).tolist() == [1.0, 3.0]
    assert math.isnan(smoothed([math.nan], 0.9)[0])


def test_lines_with_some_metrics(tmp_path: Path) -> None:
    lines = make_table(tmp_path / "m", [1.0, 2.0]).lines("timing_s/*")
    assert lines == [{"step": 1, "timing_s/step": 36.0}, {"step": 2, "timing_s/step": 36.0}]
