"""Staleness of tokens if several weight versions sampled a response; counts of updates with float16."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megarl.checkpoint.next_commands import Repetition
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.errors import SpoiledWeights
from megarl.observe.log import RunLog
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.schema import Recipe
from megarl.trainer.step_metrics import MEMORY, log_update, staleness
from megarl.trainer.worker import token_versions
from megarl.types import Group, InlineData, Metrics, Sample, ShardSample, Span


def sample(length: int, *spans: Span) -> Sample:
    return Sample(0, 0, InlineData([]), 3, length, length, spans=spans)


def test_staleness_is_a_mean_over_tokens() -> None:
    """Lags behind version 5: 10 tokens of 0; 4 tokens of 3 and 6 of 1."""
    samples = [sample(10, Span(0, 5)), sample(10, Span(0, 2), Span(4, 4))]
    assert staleness([Group(0, "row", "test", samples)], 5) == {
        "rollout/staleness_mean": pytest.approx((4 * 3 + 6 * 1) / 20),
        "rollout/staleness_max": 3.0,
        "rollout/spans_mean": 1.5,
    }


def test_empty_responses_have_the_staleness_of_their_version() -> None:
    assert staleness([Group(0, "row", "test", [sample(0, Span(0, 4))])], 5)["rollout/staleness_mean"] == 1.0


def test_versions_of_tokens_start_at_the_prompt() -> None:
    shared = ShardSample(InlineData([]), 0, length=8, prompt_length=3, spans=(Span(0, 2), Span(2, 4), Span(4, 5)))
    np.testing.assert_array_equal(token_versions(shared), [2, 2, 2, 2, 2, 4, 4, 5])
    whole = ShardSample(InlineData([]), 0, length=4, prompt_length=3, spans=(Span(0, 7),))
    np.testing.assert_array_equal(token_versions(whole), [7] * 4)


def update(norm: float, *, skipped: float = 0.0, overflow: float = 0.0, scale: float = 1.0) -> Metrics:
    return {
        "actor/grad_norm": norm, "actor/lr": 1e-6, "actor/skipped_updates": skipped, "actor/overflows": overflow,
        "actor/loss_scale": scale, MEMORY: 1.0,
    }  # fmt: skip


def test_overflows_are_counted_apart_and_do_not_end_a_run(tmp_path: Path) -> None:
    """Steps without an update end a run only when the loss scale cannot fall any more."""
    recipe = Recipe()
    recipe.train.stop_after_skipped, recipe.observe.tensorboard, recipe.observe.console = 2, False, "plain"
    with RunLog(recipe, tmp_path, 1, 9) as log:
        skipped = SkippedSteps(recipe.train, Repetition(RunDirectory(tmp_path), has_tape=False, checkpoint=None))
        for step in range(1, 5):
            updates = [update(math.inf, overflow=1.0, scale=4.0), update(math.nan, overflow=1.0, scale=2.0)]
            metrics = log_update(log, skipped, step, "actor", [updates])
            skipped.check(step)
        assert (
            metrics["actor/overflows"] == 2
            and metrics["actor/skipped_updates"] == 0
            and metrics["actor/loss_scale"] == 2
        )
        assert "actor/grad_norm" not in metrics, "advice reports norms that are not finite"
        assert not skipped.streaks() and (tmp_path / "notices.jsonl").read_text() == ""
        mixed = log_update(log, skipped, 5, "actor", [[update(math.inf, overflow=1.0, scale=2.0), update(3.0)]])
        assert mixed["actor/grad_norm"] == 3.0 and skipped.norms["actor"].state() == [3.0]
        log_update(
            log, skipped, 6, "actor", [[update(math.nan, overflow=1.0, scale=2.0), update(math.nan, skipped=1.0)]]
        )
        skipped.check(6)
        log_update(log, skipped, 7, "actor", [[update(math.nan, skipped=1.0)]])
        with pytest.raises(SpoiledWeights, match="nothing was learned in 2 consecutive steps, 6 to 7"):
            skipped.check(7)
