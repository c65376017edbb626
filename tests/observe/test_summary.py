"""summary.json against figures worked by hand."""

import math

import pytest

from megarl.observe.summary import summarize


def test_figures_by_hand():
    lines = [
        {"step": 0, "eval/pass@1": 0.25, "eval/greedy": 0.0, "timing_s/eval": 2.0, "timing_s/step": 2.0},
        {"step": 1, "timing_s/gen": 3.0, "timing_s/step": 4.0, "perf/total_num_tokens": 100.0, "rollout/logprob_gap_max": 2e-6},
        {"step": 2, "timing_s/gen": 5.0, "timing_s/step": 6.0, "perf/total_num_tokens": 300.0, "rollout/logprob_gap_max": 1e-6,
         "eval/pass@1": 0.75, "eval/greedy": 0.5},
    ]  # fmt: skip
    summary = summarize(lines, {"0": 10.0})
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert (summary["accuracy_greedy_before"], summary["accuracy_greedy_after"]) == (0.0, 0.5)
    assert summary["eval_loss_before"] is None
    assert summary["seconds"] == {"start": 10.0, "eval": 2.0, "step": 12.0, "gen": 8.0}
    assert summary["tokens_per_second"] == pytest.approx(400 / 10)
    assert summary["logprob_gap_max"] == 2e-6


def test_a_loss_on_held_out_rows_is_not_an_accuracy():
    summary = summarize([{"step": 0, "eval/loss": 0.75}, {"step": 1}, {"step": 2, "eval/loss": 0.5}], {})
    assert (summary["eval_loss_before"], summary["eval_loss_after"]) == (0.75, 0.5)
    assert summary["accuracy_before"] is None and summary["accuracy_after"] is None


def test_a_run_without_evaluation_or_steps_has_no_figures():
    summary = summarize([], {})
    assert (
        summary["accuracy_before"] is None
        and summary["tokens_per_second"] is None
        and summary["logprob_gap_max"] is None
    )


@pytest.mark.parametrize("gaps", [(0.1, math.nan), (math.nan, 0.1)])
def test_a_nan_gap_is_the_largest(gaps):
    lines = [{"step": step, "rollout/logprob_gap_max": gap} for step, gap in enumerate(gaps, start=1)]
    assert math.isnan(summarize(lines, {})["logprob_gap_max"])
