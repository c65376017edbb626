"""Figures by data source, against numbers worked by hand, and their names in metrics.jsonl."""

from __future__ import annotations

import math

import pytest

from megarl.observe.sources import SAMPLED, TOOLS
from megarl.rollout.admission import TriedGroup
from megarl.rollout.evaluate import by_source
from megarl.rollout.metrics import agent_figures, batch_metrics, of_evaluated, of_sampled, sampled_figures, source_of
from megarl.types import Group, InlineData, Sample, SampleFailure, ToolUse


def sample(reward: float, length: int, ended: str = "stop", use: ToolUse | None = None, **parts: float) -> Sample:
    return Sample(
        0, 0, InlineData([]), 3, length, length, reward, reward_parts=parts, finish_reason=ended, tool_use=use
    )


def group(source: str, *samples: Sample, failed: tuple[str, ...] = (), retries: int = 0) -> Group:
    failures = tuple(SampleFailure("scorer 'mine'", "row", kind, "it failed") for kind in failed)
    return Group(0, "row", source, list(samples), failures=failures, scoring_retries=retries)


GSM8K = group("openai/gsm8k", sample(1.0, 10, accuracy=1.0), sample(0.0, 40, "length", accuracy=0.0))
FILTERED = group("openai/gsm8k", sample(1.0, 20, accuracy=1.0), sample(1.0, 30, accuracy=1.0))
UNSCORED = group(
    "mine",
    sample(math.nan, 5),
    sample(math.nan, 7),
    sample(math.nan, 6),
    failed=("timeout", "crash", "error"),
    retries=6,
)
TRIED = [TriedGroup(GSM8K, True), TriedGroup(UNSCORED, False), TriedGroup(FILTERED, False)]


def test_figures_of_each_source_by_hand() -> None:
    figures = of_sampled(sampled_figures(TRIED))
    assert list(figures) == ["mine", "openai/gsm8k"]
    assert figures["openai/gsm8k"] == {
        "groups_tried": 2,
        "groups_accepted": 1,
        "samples": 4,
        "rewards/mean": 0.75,
        "accuracy": 0.75,
        "response_length/mean": 25,
        "response_length/max": 40,
        "truncated": 0.25,
        "scoring_failed": 0,
        "scoring_timeouts": 0,
        "scoring_crashes": 0,
        "scoring_errors": 0,
        "scoring_unavailable": 0,
        "scoring_retries": 0,
    }
    mine = figures["mine"]
    assert "rewards/mean" not in mine and "accuracy" not in mine, "nothing was scored: no mean, and no NaN"
    kinds = [mine[f"scoring_{kind}"] for kind in ("failed", "timeouts", "crashes", "errors", "retries")]
    assert kinds == [3, 1, 1, 1, 6]
    assert (mine["groups_tried"], mine["groups_accepted"], mine["response_length/mean"]) == (1, 0, 6)


USES = [
    sample(1.0, 9, use=ToolUse(turns=3, calls=2, failures=1, timeouts=1, seconds=2.5)),
    sample(0.0, 9, "turns", use=ToolUse(turns=8, calls=7, failures=2, seconds=0.5)),
    sample(0.0, 9, "tool_time", use=ToolUse(turns=1)),
    sample(0.0, 9, "turns", use=ToolUse(turns=8, calls=3, seconds=1.0)),
]


def test_agent_loops_by_hand() -> None:
    plain = sample(0.0, 9)
    assert agent_figures([plain]) == {}
    assert agent_figures([*USES, plain]) == {
        "agent/turns/mean": 5,
        "agent/turns/max": 8,
        "agent/calls/mean": 3,
        "agent/failed_calls": 3,
        "agent/tool_timeouts": 1,
        "agent/tool_seconds/mean": 1.0,
        "agent/tool_seconds/max": 2.5,
        "agent/ended/turns": 0.5,
        "agent/ended/tool_time": 0.25,
    }


def test_samples_that_were_sampled_again_are_counted_by_cause() -> None:
    again = [group("tools", *USES[:2]), group("tools", *USES[2:])]
    again[0].sampled_again = {"unavailable": 3, "error": 1}
    again[1].sampled_again = {"unavailable": 1, "crash": 2}
    metrics = batch_metrics([TriedGroup(each, True) for each in again], 2)
    names = ("", "_unavailable", "_errors", "_timeouts", "_crashes")
    assert [metrics[f"rollout/sampled_again{name}"] for name in names] == [7, 4, 1, 0, 2]
    without_tools = batch_metrics([TriedGroup(group("plain", sample(1.0, 10)), True)], 1)
    assert not any("sampled_again" in name for name in without_tools)


def test_agent_figures_are_separate_for_each_source() -> None:
    tried = [TriedGroup(group("tools", *USES[:2]), True), TriedGroup(group("more/tools", *USES[2:]), True), *TRIED]
    figures = of_sampled(sampled_figures(tried))
    assert (figures["tools"]["agent/turns/mean"], figures["more/tools"]["agent/turns/mean"]) == (5.5, 4.5)
    assert not any(name.startswith("agent/") for name in figures["openai/gsm8k"])


@pytest.mark.parametrize("source", ["gsm8k", "openai/gsm8k", "a/agent", "rewards/mean", "", "two\nlines", "samples"])
def test_metric_names_are_attributed_to_any_source_name(source: str) -> None:
    """Names of sources and of metrics contain slashes; each figure must be read back for its source."""
    metrics = sampled_figures([TriedGroup(group(source, *USES), True)])
    assert set(of_sampled({**metrics, "step": 1, "rollout/rewards/mean": 0.5, "agent/turns/mean": 1.0})) == {source}
    assert {source_of(name) for name in metrics} == {source}
    evaluated = by_source([group(source, *USES), group("other", sample(0.0, 5))], [], [1])
    assert set(of_evaluated({**evaluated, "eval/pass@1": 0.5, "eval/rewards/mean": 0.5})) == {source, "other"}
    assert {source_of(name) for name in evaluated} == {source, "other"}
    assert of_evaluated(evaluated)[source]["agent/turns/mean"] == 5


@pytest.mark.parametrize("name", ["eval/rewards/mean", "eval/pass@1", "eval/agent/turns/mean", "eval/loss"])
def test_metrics_of_all_sources_have_no_source(name: str) -> None:
    assert source_of(name) is None


def test_the_report_has_a_column_for_every_figure() -> None:
    tried = [*TRIED, TriedGroup(group("tools", *USES), True)]
    figures = {name for columns in of_sampled(sampled_figures(tried)).values() for name in columns}
    assert figures == {column.figure for column in (*SAMPLED, *TOOLS)}


def test_an_evaluation_has_figures_of_each_of_several_sources() -> None:
    problems = [
        group("a", sample(1.0, 10, accuracy=1.0), sample(0.0, 20, accuracy=0.0)),
        group("a", sample(0.0, 10, accuracy=0.0), sample(0.0, 20, accuracy=0.0)),
        group("b/c", sample(1.0, 40, accuracy=1.0), sample(0.5, 40, "length", accuracy=1.0)),
        group("none", sample(math.nan, 1), sample(math.nan, 1), failed=("crash", "crash")),
    ]
    greedy = [group("a", sample(1.0, 10)), group("a", sample(0.0, 10)), group("b/c", sample(1.0, 10))]
    figures = of_evaluated(by_source(problems, greedy, [1, 2]))
    assert (figures["a"]["problems"], figures["a"]["pass@1"], figures["a"]["pass@2"], figures["a"]["greedy"]) == (
        2,
        0.25,
        0.5,
        0.5,
    )
    assert (figures["b/c"]["pass@1"], figures["b/c"]["greedy"], figures["b/c"]["rewards/mean"]) == (1.0, 1.0, 0.75)
    assert figures["b/c"]["response_length/clip_ratio"] == 0.5
    assert figures["none"] == {"problems": 1, "scoring_failed": 2}, "no problem of it was scored: no means"
    assert by_source(problems[:2], greedy[:2], [1]) == {}, "one source: the evaluation's own figures say it"
