"""What a step reports of all ranks."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.controller import combine_gaps
from megarl.worker import gap_sums


def vectors(gaps: list[float], mask: list[int]) -> dict[str, torch.Tensor]:
    rollout = torch.full((len(gaps),), -2.0)
    return {
        "loss_mask": torch.tensor(mask),
        "old_log_probs": rollout + torch.tensor(gaps),
        "rollout_log_probs": rollout,
    }


def test_gaps_are_those_of_all_ranks_masked_tokens() -> None:
    """Gaps 0.5, -0.25 and 1: mean 1.75 / 3; k3 = e^d - d - 1 of each: 0.148721 + 0.028801 + 0.718282, over 3."""
    ranks = [
        gap_sums([vectors([0.5, 9.0], [1, 0]), vectors([3.0], [0])]),
        None,
        gap_sums([vectors([-0.25, 1], [1, 1])]),
    ]
    assert combine_gaps(ranks) == {
        "rollout/logprob_gap_mean": pytest.approx(1.75 / 3),
        "rollout/logprob_gap_k3": pytest.approx((0.148721 + 0.028801 + 0.718282) / 3, abs=1e-6),
        "rollout/logprob_gap_max": pytest.approx(1.0),
    }


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_token_that_is_nan_shows_in_every_figure(broken: int) -> None:
    gaps = [0.5, 1.0, 0.25]
    gaps[broken] = math.nan
    for parts in ([gaps], [gaps[:1], gaps[1:]]):
        sums = [gap_sums([vectors(part, [1] * len(part))]) for part in parts]
        together = gap_sums([vectors(part, [1] * len(part)) for part in parts])
        for metrics in (combine_gaps(sums), combine_gaps([together])):
            assert all(math.isnan(value) for value in metrics.values()), metrics


def test_no_token_has_no_gap() -> None:
    assert combine_gaps([None, gap_sums([vectors([1.0], [0])])]) == {}
