"""Losses that select tokens of a mini batch, against numbers worked by hand and however the mini batch is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.inputs import LossInputs, TokenSums
from megarl.algorithms.losses.covariance import covariances, highest, threshold
from megarl.algorithms.losses.second_moment import second_moment_limit
from megarl.recipe.algorithm import AlgorithmConfig
from tests.support.loss_cases import inputs, part_of, random_inputs, sequences_of, settings


def selected(parts: list[LossInputs], draws: list[np.ndarray], config: AlgorithmConfig) -> list[np.ndarray]:
    """Select tokens as processes do that hold one part of the mini batch each."""
    sums = sum((TokenSums.of(part) for part in parts), TokenSums())
    selection = LOSSES[config.loss].selection
    assert selection is not None
    scores = [selection.scores(part, sums, draw, config) for part, draw in zip(parts, draws, strict=True)]
    limit = selection.limit([selection.candidates([part], sums, config) for part in scores], sums, config)
    return [part >= limit for part in scores]


def test_covariances_by_hand() -> None:
    """log p: 0, -1, -2 (and an excluded token); A: 1, 3, 2. Means -1 and 2: (1)(-1), (0)(1), (-1)(0)."""
    batch = inputs([1.0, np.exp(-1), 0.5, np.exp(-2)], [1, 3, 99, 2], mask=[1, 1, 0, 1])
    computed = covariances(batch, TokenSums.of(batch))
    np.testing.assert_allclose(computed[[0, 1, 3]], [-1, 0, 0], atol=1e-12)


def test_kl_cov_selects_the_highest_covariances() -> None:
    """Covariances: log p - mean = 1.5, 0.5, -0.5, -1.5 and A - mean = 1, -1, 1, -1: 1.5, -0.5, -0.5, 1.5."""
    batch = inputs([np.exp(-n) for n in (1, 2, 3, 4)], [2, 0, 2, 0])
    (chosen,) = selected([batch], [np.zeros(4)], settings(loss="kl_cov", cov_share=0.5))
    assert chosen.tolist() == [True, False, False, True]
    batch.selected = torch.tensor(chosen)
    loss, metrics = LOSSES["kl_cov"].function(batch, settings(cov_kl_coef=0.5))
    expected = [-2 * np.exp(-1) + 0.5, 0, -2 * np.exp(-3), 2.0]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64))
    assert metrics["actor/cov_selected"].tolist() == [1, 0, 0, 1]


def test_clip_cov_draws_unclipped_tokens_within_its_bounds() -> None:
    """Covariances 4.5, -0.5, -0.5, 4.5 with A of 6, 0, 6, 0: of the last and first the first is clipped (ratio e)."""
    batch = inputs([np.exp(-n) for n in (1, 2, 3, 4)], [6, 0, 6, 0])
    batch.old_log_probs = batch.log_probs.detach() - torch.tensor([1.0, 0, 0, 0])
    config = settings(loss="clip_cov", cov_share=0.25, cov_low=1.0, cov_high=5.0)
    (chosen,) = selected([batch], [np.array([0.9, 0.8, 0.7, 0.1])], config)
    assert chosen.tolist() == [False, False, False, True]
    (chosen,) = selected([batch], [np.zeros(4)], settings(loss="clip_cov", cov_share=1.0, cov_low=4.6, cov_high=5.0))
    assert not chosen.any(), "outside of the bounds"
    (chosen,) = selected([batch], [np.zeros(4)], settings(loss="clip_cov", cov_share=1.0, cov_low=1.0, cov_high=4.4))
    assert not chosen.any()
    batch.selected = torch.tensor([False, False, True, True])
    loss, _ = LOSSES["clip_cov"].function(batch, config)
    assert loss.tolist() == pytest.approx([-6 * 1.2, 0, 0, 0])
    (gradient,) = torch.autograd.grad(loss.sum(), batch.log_probs)
    assert gradient.tolist() == [0, 0, 0, 0], "clipped, of no advantage, held back"


def test_m2po_leaves_out_the_tokens_that_moved_furthest() -> None:
    """log ratios 0.1, -0.4, 0.2, 0.3: moments 0.01, 0.16, 0.04, 0.09, mean 0.075; without 0.16: 0.0467; then 0.025."""
    batch = inputs([0.5] * 4, [1, -1, 1, 2])
    batch.old_log_probs = batch.log_probs.detach() - torch.tensor([0.1, -0.4, 0.2, 0.3])
    for limit, expected in ((0.08, []), (0.05, [1]), (0.04, [1, 3]), (0.001, [0, 1, 2, 3])):
        (chosen,) = selected([batch], [np.zeros(4)], settings(loss="m2po", second_moment=limit))
        assert np.flatnonzero(chosen).tolist() == expected, limit
    batch.selected = torch.tensor([False, True, False, True])
    loss, metrics = LOSSES["m2po"].function(batch, settings())
    assert loss.tolist() == pytest.approx([-np.exp(0.1), 0, -np.exp(0.2), 0])
    (gradient,) = torch.autograd.grad(loss.sum(), batch.log_probs)
    assert gradient.tolist() == pytest.approx([-np.exp(0.1), 0, -np.exp(0.2), 0])
    assert metrics["actor/second_moment_excluded"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_second_moment_of_the_others_is_at_most_the_limit(seed: int) -> None:
    """And no smaller set could be left out: with the smallest excluded token the mean is above it."""
    moments = np.random.default_rng(seed).standard_normal(50) ** 2
    limit = second_moment_limit(moments, 0.5)
    smaller = moments[moments < limit]
    assert smaller.mean() <= 0.5 < np.append(smaller, limit).mean()
    assert second_moment_limit(moments, 100.0) == np.inf == second_moment_limit(np.empty(0), 0.5)
    assert second_moment_limit(np.array([0.3, 0.2]), 0.1) == 0.2, "nothing stays"


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "m2po"])
def test_the_selection_does_not_depend_on_the_split(loss: str) -> None:
    batch = random_inputs(0, [30, 7, 50, 13])
    draws = np.random.default_rng(1).random(100)
    config = settings(loss=loss, cov_share=0.1, cov_low=0.1, cov_high=3.0, second_moment=0.02)
    (whole,) = selected([batch], [draws], config)
    sequence = sequences_of(batch).numpy()
    parts = [[2], [3, 0], [1]]
    of_parts = [np.concatenate([draws[sequence == number] for number in part]) for part in parts]
    chosen = selected([part_of(batch, part) for part in parts], of_parts, config)
    expected = [np.concatenate([whole[sequence == number] for number in part]) for part in parts]
    for got, expected_part in zip(chosen, expected, strict=True):
        np.testing.assert_array_equal(got, expected_part)
    counted = int(batch.loss_mask.sum())
    assert whole.sum() == int(0.1 * counted) or (loss == "m2po" and 0 < whole.sum() < counted)
    assert not whole[batch.loss_mask.numpy() == 0].any()


def test_scores_that_are_not_numbers_replace_no_other() -> None:
    parts = [np.array([np.nan, 3.0, -np.inf]), np.array([1.0, np.nan, np.nan])]
    assert highest(parts[:1], 1).tolist() == [3.0] and highest(parts, 9).tolist() == [1.0, 3.0]
    assert threshold([highest([part], 1) for part in parts], 1) == 3.0


def test_threshold() -> None:
    parts = [np.array([3.0, -np.inf]), np.array([5.0, 1.0])]
    assert threshold(parts, 2) == 3.0 and threshold(parts, 9) == 1.0
    assert threshold([np.array([-np.inf])], 1) == np.inf == threshold([], 1)
    assert TokenSums(tokens=10).count(0.01) == 1 and TokenSums(tokens=1000).count(0.01) == 10


@pytest.mark.parametrize(("tokens", "share", "count"), [(199, 0.01, 1), (1999, 0.002, 3), (100, 0.29, 28), (7, 0.5, 3)])
def test_the_number_of_selected_tokens_is_rounded_down(tokens: int, share: float, count: int) -> None:
    """The authors' implementation takes max(1, int(share * tokens)), in Python's floats: 0.29 * 100 is below 29."""
    assert TokenSums(tokens=tokens).count(share) == count


def test_a_mini_batch_without_loss_tokens_selects_none() -> None:
    batch = random_inputs(1, [4])
    batch.loss_mask.zero_()
    for loss in ("kl_cov", "m2po"):
        (chosen,) = selected([batch], [np.zeros(4)], settings(loss=loss))
        assert not chosen.any()
