"""Data sources for readers: tables in report and console, and the chart of many sources."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.observe import sources
from megarl.observe.console.figures import figures
from megarl.observe.console.live import LiveConsole
from megarl.observe.console.plain import PlainConsole
from megarl.observe.metrics import read_metrics
from megarl.observe.page.charts import present
from megarl.observe.page.report import report_data
from megarl.observe.sinks import mlflow_name
from megarl.observe.sources import brief_table, limit_sources, report_tables
from tests.support.agent_run import make_agent_run

QUIET = {"samples": 4, "rewards/mean": 0.5, "response_length/mean": 1234, "truncated": 0.25, "scoring_failed": 0}


def line(step: int, **of_source: dict[str, float]) -> dict[str, float]:
    named = {f"source/{source}/{name}": value for source, values in of_source.items() for name, value in values.items()}
    return {"step": step, **named}


def source_lines(metrics: dict[str, float]) -> list[str]:
    stream = io.StringIO()
    console = PlainConsole("run", 0, 9, stream)
    console.step(1, metrics)
    return stream.getvalue().splitlines()[2:]


def test_one_source_without_failures_prints_no_line() -> None:
    assert source_lines(line(1, gsm8k=QUIET)) == []
    assert source_lines({"step": 1, "rollout/rewards/mean": 0.5}) == []
    assert source_lines(line(1, gsm8k={**QUIET, "scoring_failed": 2, "scoring_timeouts": 2})) == [
        "  gsm8k: samples 4 | reward 0.500 | length 1,234 | cut 25.0% | not scored 2 | time-outs 2"
    ]
    assert source_lines(line(1, gsm8k={**QUIET, "agent/tool_timeouts": 3})) == [
        "  gsm8k: samples 4 | reward 0.500 | length 1,234 | cut 25.0% | tool time-outs 3"
    ]


def test_each_source_prints_a_line_up_to_a_limit() -> None:
    quiet = "samples 4 | reward 0.500 | length 1,234 | cut 25.0%"
    assert source_lines(line(1, a=QUIET, b=QUIET)) == [f"  a: {quiet}", f"  b: {quiet}"]
    # of fifty sources, those with failures and the largest
    many = {f"set{i:02d}": {**QUIET, "samples": 100.0 - i} for i in range(50)}
    many["set49"]["scoring_failed"] = 1
    lines = source_lines(line(1, **many))
    assert len(lines) == 9 and lines[-1] == "  and 42 more sources, in metrics.jsonl"
    assert [text.split(":")[0].strip() for text in lines[:-1]] == [f"set{i:02d}" for i in (0, 1, 2, 3, 4, 5, 6, 49)]


def test_the_live_display_has_the_table() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    live = LiveConsole("run", 0, 9, stream)
    try:
        live._console.width = 80
        figures = {**QUIET, "accuracy": 0.5, "agent/turns/mean": 2.5}
        trouble = {"scoring_failed": 7.0, "scoring_timeouts": 5.0, "scoring_crashes": 2.0, "agent/failed_calls": 9.0}
        live.step(1, line(1, **{"DigitalLearningGmbH/MATH-lighteval": figures, "[bold]mine": {**figures, **trouble}}))
        with live._console.capture() as captured:
            live._console.print(live._render())
    finally:
        live.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", captured.get())
    assert re.search(r"DigitalLearningGmbH… +4 +0\.500 +50\.0% +1,234 +25\.0% +2\.5", text), "figures stay whole"
    assert re.search(r"\[bold\]mine .* 2\.5 +not sc", text), (
        "a source's name is not markup; its trouble is cut, not wrapped"
    )


def test_evaluations_of_sources_are_not_in_a_steps_line() -> None:
    of_source = {"eval/openai/gsm8k/pass@1": 0.25, "eval/openai/gsm8k/agent/turns/mean": 3.0}
    assert figures({"eval/pass@1": 0.5, **of_source}) == [("eval/pass@1", "0.500")]


def test_a_table_omits_empty_columns() -> None:
    table = brief_table(line(1, a=QUIET, b={**QUIET, "scoring_failed": 1, "scoring_crashes": 1}), 8)
    assert table.head == ["samples", "reward", "length", "cut", "not scored", "crashes"]
    assert table.rows == [
        ("a", ["4", "0.500", "1,234", "25.0%", "", ""]),
        ("b", ["4", "0.500", "1,234", "25.0%", "1", "1"]),
    ]
    none_scored = {name: value for name, value in QUIET.items() if name != "rewards/mean"}
    assert brief_table(line(1, a=QUIET, b=none_scored), 8).rows[1][1][1] == "–"


def test_steps_with_failures_are_kept_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_STEPS", 10)
    lines = [line(step, a={**QUIET, "scoring_failed": float(step == 37)}) for step in range(1, 101)]
    tables = report_tables([{"step": 0, "eval/pass@1": 0.5}, *lines])
    steps = [entry["step"] for entry in tables["steps"]]
    assert {1, 37, 100} <= set(steps) and len(steps) <= 15 and tables["of"] == 100
    assert [entry["step"] for entry in tables["steps"] if entry["not_scored"]] == [37]


def test_curves_show_only_the_largest_sources() -> None:
    lines = [line(step, **{f"set{i}": {**QUIET, "samples": float(i)} for i in range(12)}) for step in (1, 2)]
    names = sorted({name for line in lines for name in line} - {"step"})
    shown, note = limit_sources(lines, ["actor/lr", *names])
    kept = {name.split("/")[1] for name in shown[1:]}
    assert shown[0] == "actor/lr"
    assert kept == {f"set{i}" for i in range(4, 12)}
    assert note == "Curves show the 8 largest of 12 data sources; metrics.jsonl has all."
    assert limit_sources([line(1, a=QUIET)], ["source/a/samples"]) == (["source/a/samples"], "")
    unsampled = [f"eval/set{i}/pass@1" for i in range(9)]
    assert len(limit_sources([{"step": 1, "eval/set8/problems": 2.0}], unsampled)[0]) == 8, "sources without samples"


def test_one_source_has_no_separate_chart() -> None:
    def titles(*names: str) -> list[Any]:
        return [chart["title"] for chart in present([f"source/{name}/rewards/mean" for name in names])]

    assert titles("openai/gsm8k") == []
    assert titles("openai/gsm8k", "b") == ["Reward by data source"]
    (chart,) = present(["eval/pass@1", "eval/maj@4", "eval/openai/gsm8k/pass@1"])
    assert chart["series"] == [("eval/pass@1", "pass@1"), ("eval/maj@4", "maj@4")]
    (chart,) = present(["eval/openai/gsm8k/pass@1", "eval/b/pass@1"])
    assert chart["series"] == [("eval/b/pass@1", "b"), ("eval/openai/gsm8k/pass@1", "openai/gsm8k")]


def test_a_runs_tables(tmp_path: Path) -> None:
    """Groups reach metrics.jsonl and the page's data, including a step with unscored samples."""
    make_agent_run(tmp_path, ["openai/gsm8k", "tools/search"])
    second = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert second["source/tools/search/scoring_timeouts"] == 2 and second["agent/tool_timeouts"] == 4
    steps = {entry["step"]: entry for entry in report_data(tmp_path)["answers"]["runs/0/sources"]["steps"]}
    assert [table["title"] for table in steps[1]["tables"]] == ["Sampled", "Agent loops", "Evaluation"]
    assert [table["title"] for table in steps[2]["tables"]] == ["Sampled", "Agent loops"]
    sampled = steps[2]["tables"][0]
    (row,) = (cells for source, cells in sampled["rows"] if source == "tools/search")
    row_cells = dict(zip(sampled["head"], row, strict=True))
    assert (row_cells["samples"], row_cells["reward"], row_cells["length"], row_cells["longest"]) == (
        "8",
        "0.500",
        "69",
        "108",
    )
    assert (row_cells["groups"], row_cells["trained on"], row_cells["not scored"], row_cells["crashes"]) == (
        "2",
        "1",
        "4",
        "1",
    )
    assert steps[2]["not_scored"] == 4
    assert json.dumps(steps)


def test_all_sources_are_written_and_the_largest_drawn(tmp_path: Path) -> None:
    make_agent_run(tmp_path, [f"set{i}" for i in range(50)], steps=2)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert all(f"source/set{i}/rewards/mean" in last and f"eval/set{i}/pass@1" in last for i in range(50))
    data = report_data(tmp_path)
    assert len([name for name in data["curves"]["metrics"] if re.fullmatch("source/.*/rewards/mean", name)]) == 8
    (chart,) = [chart for chart in data["answers"]["charts"]["charts"] if chart["title"] == "Reward by data source"]
    assert len(chart["series"]) == 8 and all(name in data["curves"]["metrics"] for name, _ in chart["series"])
    assert "8 largest of 50" in data["answers"]["charts"]["note"]
    assert len(data["answers"]["runs/0/sources"]["steps"][-1]["tables"][0]["rows"]) == 50


def test_names_are_converted_for_mlflow() -> None:
    assert mlflow_name("eval/pass@1") == "eval/pass_at_1"
    assert mlflow_name("source/a+b (c)/rewards/mean") == "source/a_b _c_/rewards/mean"
