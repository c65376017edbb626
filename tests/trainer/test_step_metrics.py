"""Staleness of tokens if several weight versions sampled a response."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.trainer.step_metrics import staleness
from megarl.trainer.worker import token_versions
from megarl.types import Group, InlineData, Sample, ShardSample, Span


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
