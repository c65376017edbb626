"""Advantages, losses, aggregation, KL and shaping against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.losses import LOSSES, objective
from megarl.algorithms.shaping import counts_in_loss, has_spread, overlong_penalty
from megarl.config.schema import AlgorithmConfig
from megarl.types import InlineData, Sample


def settings(**values: object) -> AlgorithmConfig:
    return AlgorithmConfig(**values)  # type: ignore[arg-type]


class TestGRPO:
    def test_by_hand(self) -> None:
        # Group 7: rewards 1, 0, 0, 1: mean 1/2, squares 4 * 1/4 = 1, std = sqrt(1/3).
        # Group 3: rewards 2, 4: mean 3, squares 2, std = sqrt(2).
        advantages = ADVANTAGES["grpo"](np.array([1, 2, 0, 0, 4, 1.0]), np.array([7, 3, 7, 7, 3, 7]), settings())
        half = 0.5 / (math.sqrt(1 / 3) + 1e-6)
        one = 1 / (math.sqrt(2) + 1e-6)
        np.testing.assert_allclose(advantages, [half, -one, -half, -half, one, half], rtol=1e-12)

    def test_without_std_is_dr_grpo(self) -> None:
        advantages = ADVANTAGES["grpo"](np.array([1, 0, 0, 1.0]), np.zeros(4), settings(normalize_by_std=False))
        np.testing.assert_allclose(advantages, [0.5, -0.5, -0.5, 0.5])

    def test_equal_rewards_and_a_group_of_one_have_no_advantage(self) -> None:
        advantages = ADVANTAGES["grpo"](np.array([3, 3, 3, 5.0]), np.array([0, 0, 0, 1]), settings())
        np.testing.assert_array_equal(advantages, np.zeros(4))

    def test_order_of_samples_does_not_matter(self) -> None:
        rng = np.random.default_rng(0)
        rewards, groups = rng.normal(size=40), rng.integers(0, 7, size=40)
        order = rng.permutation(40)
        whole = ADVANTAGES["grpo"](rewards, groups, settings())
        np.testing.assert_allclose(ADVANTAGES["grpo"](rewards[order], groups[order], settings()), whole[order])


class TestAggregation:
    lengths = np.array([2, 0, 6])  # the second sample is masked throughout

    @pytest.mark.parametrize(
        ("name", "weights"),
        [
            ("token_mean", [1 / 8, 1 / 8, 1 / 8]),  # 8 tokens; the masked sample has none to weigh
            ("seq_mean_token_mean", [1 / 4, 0, 1 / 12]),  # 2 samples count: 1/2 * 1/2 and 1/2 * 1/6
            ("seq_mean_token_sum", [1 / 2, 0, 1 / 2]),
            ("seq_mean_token_sum_norm", [1 / 20, 0, 1 / 20]),  # over max_response_length 10
        ],
    )
    def test_by_hand(self, name: str, weights: list[float]) -> None:
        np.testing.assert_allclose(AGGREGATIONS[name](self.lengths, 10), weights)

    @pytest.mark.parametrize("name", AGGREGATIONS.names())
    def test_nothing_masked_in_weighs_nothing(self, name: str) -> None:
        tokens = np.zeros(3)
        assert np.isfinite(AGGREGATIONS[name](tokens, 10)).all()


def test_kl_estimators_by_hand() -> None:
    # p = 0.5, q = 0.25: log p - log q = ln 2; k3 = q/p - ln(q/p) - 1 = 0.5 + ln 2 - 1.
    p, q = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    expected = {"kl": math.log(2), "abs": math.log(2), "mse": math.log(2) ** 2 / 2, "low_var_kl": math.log(2) - 0.5}
    assert set(expected) == set(KL_ESTIMATORS.names())
    for name, value in expected.items():
        assert KL_ESTIMATORS[name](p, q).item() == pytest.approx(value, rel=1e-6), name
    assert KL_ESTIMATORS["abs"](q, p).item() == pytest.approx(math.log(2), rel=1e-6)
    assert math.isfinite(KL_ESTIMATORS["low_var_kl"](torch.tensor([-1000.0]), torch.tensor([0.0])).item())


def inputs(ratios: list[float], advantages: list[float], mask: list[float] | None = None) -> LossInputs:
    count = len(ratios)
    loss_mask = torch.tensor(mask or [1.0] * count, dtype=torch.float64)
    tokens = loss_mask.sum()
    return LossInputs(
        log_probs=torch.tensor(ratios, dtype=torch.float64).log().requires_grad_(),
        old_log_probs=torch.zeros(count, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=loss_mask,
        loss_weights=loss_mask / tokens,
        token_share=loss_mask / tokens,
    )


class TestPPOClip:
    def test_by_hand(self) -> None:
        # low 0.2, high 0.28. Columns: inside; above with A > 0 (clipped to 1.28); above with A < 0 (kept);
        # below with A > 0 (kept); below with A < 0 (clipped to 0.8).
        batch = inputs([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
        loss, metrics = LOSSES["ppo_clip"].function(batch, settings(clip_high=0.28))
        torch.testing.assert_close(loss, torch.tensor([-2.2, -2.56, 3.0, -1.0, 1.6], dtype=torch.float64))
        assert metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 0, 1]
        loss.sum().backward()
        gradient = batch.log_probs.grad
        assert gradient is not None  # d loss / d log_prob = -A ratio where not clipped, else 0
        torch.testing.assert_close(gradient, torch.tensor([-2.2, 0.0, 3.0, -1.0, 0.0], dtype=torch.float64))

    def test_dual_clip_bounds_the_loss_of_bad_samples(self) -> None:
        batch = inputs([5.0, 5.0], [-1.0, 1.0])
        loss, metrics = LOSSES["ppo_clip"].function(batch, settings(dual_clip=3.0))
        torch.testing.assert_close(loss, torch.tensor([3.0, -1.2], dtype=torch.float64))
        assert metrics["actor/pg_clipfrac_lower"].tolist() == [1, 0]

    def test_extreme_ratios_stay_finite(self) -> None:
        batch = inputs([1.0], [-1.0])
        batch.log_probs = torch.tensor([500.0], dtype=torch.float64)
        loss, _ = LOSSES["ppo_clip"].function(batch, settings())
        assert loss.item() == pytest.approx(math.exp(20))


class TestObjective:
    def test_masked_tokens_count_nowhere_even_if_they_are_nan(self) -> None:
        batch = inputs([1.1, 1.1, 1.1], [1.0, 1.0, 3.0], mask=[1, 0, 1])
        batch.advantages[1] = math.nan  # type: ignore[index]
        loss, metrics = objective(batch, settings())
        assert loss.item() == pytest.approx(-(1.1 * 1 + 1.1 * 3) / 2)
        assert metrics["actor/ratio"].item() == pytest.approx(1.1)

    def test_parts_add_up_to_the_whole(self) -> None:
        generator = torch.Generator().manual_seed(0)
        ratios = (torch.rand(12, generator=generator) + 0.5).tolist()
        advantages = torch.randn(12, generator=generator).tolist()
        whole = inputs(ratios, advantages)
        loss, metrics = objective(whole, settings())
        parts = []
        for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
            piece = inputs(ratios[part], advantages[part])
            piece.loss_weights, piece.token_share = whole.loss_weights[part], whole.token_share[part]
            parts.append(objective(piece, settings()))
        torch.testing.assert_close(sum(part[0] for part in parts), loss)
        for name in metrics:
            torch.testing.assert_close(sum(part[1][name] for part in parts), metrics[name])

    def test_kl_and_entropy_enter_the_loss(self) -> None:
        batch = inputs([1.0, 1.0], [0.0, 0.0])
        batch.reference_log_probs = torch.tensor([-1.0, -1.0], dtype=torch.float64)
        batch.entropy = torch.tensor([2.0, 4.0], dtype=torch.float64)
        loss, metrics = objective(batch, settings(kl_coef=0.1, kl_estimator="kl", entropy_coef=0.01))
        assert metrics["actor/kl_loss"].item() == pytest.approx(1.0)
        assert metrics["actor/entropy"].item() == pytest.approx(3.0)
        assert loss.item() == pytest.approx(0.1 * 1.0 - 0.01 * 3.0)
        assert metrics["actor/pg_loss"].item() == 0.0

    def test_sft_is_the_mean_negative_log_likelihood(self) -> None:
        batch = inputs([0.5, 0.25], [0.0, 0.0])
        loss, _ = objective(batch, settings(loss="sft"))
        assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
        assert not LOSSES["sft"].needs_old_log_probs and LOSSES["ppo_clip"].needs_old_log_probs


def sample(reward: float, finish: str = "stop", **parts: float) -> Sample:
    return Sample(0, 0, InlineData([]), 1, 1, 1, reward=reward, reward_parts=parts, finish_reason=finish)


class TestShaping:
    def test_overlong_penalty_by_hand(self) -> None:
        # max 100, buffer 20: free up to 80, half way at 90, the whole factor at 100.
        np.testing.assert_allclose(overlong_penalty(np.array([80, 90, 100]), 100, 20, 0.5), [0, -0.25, -0.5])
        np.testing.assert_array_equal(overlong_penalty(np.array([100]), 100, 0, 1.0), [0])

    def test_spread(self) -> None:
        assert not has_spread([sample(1.0), sample(1.0)], "reward")
        assert has_spread([sample(1.0), sample(0.0)], "reward")
        assert not has_spread([sample(0.9, accuracy=1.0), sample(1.0, accuracy=1.0)], "accuracy")
        with pytest.raises(ValueError, match="parts: accuracy"):
            has_spread([sample(0.9, accuracy=1.0)], "acc")

    def test_overlong_filter(self) -> None:
        assert not counts_in_loss(sample(0.0, "length"), overlong_filter=True)
        assert counts_in_loss(sample(0.0, "length"), overlong_filter=False)
        assert counts_in_loss(sample(0.0, "stop"), overlong_filter=True)


def test_unknown_names_point_to_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'ppo_clip'"):
        LOSSES["ppoclip"]
