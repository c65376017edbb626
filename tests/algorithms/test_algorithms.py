"""Aggregation, KL, shaping and the objective that joins them to a loss, against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.algorithms.aggregation import aggregate
from megarl.algorithms.catalogue import AGGREGATIONS, KL_ESTIMATORS
from megarl.algorithms.kl import KLWeight
from megarl.algorithms.objective import kl_to_reference, objective, runs_old_log_prob_pass
from megarl.algorithms.shaping import counts_in_loss, group_numbers, has_spread, overlong_penalty, reward_part
from megarl.types import Group, InlineData, Sample
from tests.support.loss_cases import inputs, random_inputs, settings


class TestAggregation:
    lengths = np.array([2, 0, 6])  # the second sample is excluded
    groups = np.array([4, 4, 1])

    @pytest.mark.parametrize(
        ("name", "weights"),
        [
            ("token_mean", [1 / 8, 1 / 8, 1 / 8]),  # 8 loss tokens; the excluded sample has none
            ("seq_mean_token_mean", [1 / 4, 0, 1 / 12]),  # 2 samples count: 1/2 * 1/2 and 1/2 * 1/6
            ("seq_mean_token_sum", [1 / 2, 0, 1 / 2]),
            ("seq_mean_token_sum_norm", [1 / 20, 0, 1 / 20]),  # over max_response_length 10
            ("token_sum", [1 / 10, 0, 1 / 10]),
            ("prompt_mean", [1 / 4, 0, 1 / 12]),  # here each prompt has one sample that counts
        ],
    )
    def test_by_hand(self, name: str, weights: list[float]) -> None:
        np.testing.assert_allclose(aggregate(AGGREGATIONS[name], self.lengths, 10, self.groups), weights)

    def test_prompts_share_their_weight_by_tokens(self) -> None:
        weights = aggregate(AGGREGATIONS["prompt_mean"], np.array([2, 6, 4, 0]), 10, np.array([9, 9, 3, 5]))
        np.testing.assert_allclose(weights, [1 / 16, 1 / 16, 1 / 8, 0])  # two prompts count, with 8 and 4 tokens

    def test_a_function_of_two_parameters_gets_no_groups(self) -> None:
        assert aggregate(lambda tokens, divisor: tokens / divisor, np.array([5]), 10, np.array([0])).tolist() == [0.5]

    @pytest.mark.parametrize("name", AGGREGATIONS.names())
    def test_samples_without_loss_tokens_have_finite_weights(self, name: str) -> None:
        tokens = np.zeros(3)
        assert np.isfinite(aggregate(AGGREGATIONS[name], tokens, 10, np.arange(len(tokens)))).all()


def test_kl_estimators_by_hand() -> None:
    # p = 0.5, q = 0.25: log p - log q = ln 2; k3 = q/p - ln(q/p) - 1 = 0.5 + ln 2 - 1.
    p, q = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    expected = {"kl": math.log(2), "abs": math.log(2), "mse": math.log(2) ** 2 / 2, "low_var_kl": math.log(2) - 0.5}
    assert set(expected) == set(KL_ESTIMATORS.names())
    for name, value in expected.items():
        assert KL_ESTIMATORS[name](p, q).item() == pytest.approx(value, rel=1e-6), name
    assert KL_ESTIMATORS["abs"](q, p).item() == pytest.approx(math.log(2), rel=1e-6)
    assert math.isfinite(KL_ESTIMATORS["low_var_kl"](torch.tensor([-1000.0]), torch.tensor([0.0])).item())


class TestKLWeight:
    def test_by_hand(self) -> None:
        # Error 0.3 / 0.25 - 1 = 0.2, then 0.9 / 0.25 - 1 = 2.6, held at 0.2; then 0 - 1, held at -0.2.
        weight = KLWeight(0.1, target=0.25, horizon=100)
        for kl, expected in ((0.3, 0.1 * 1.1), (0.9, 0.1 * 1.1 * 1.1), (0.0, 0.1 * 1.1 * 1.1 * 0.9)):
            weight.adapt(kl, samples=50)
            assert weight.value == pytest.approx(expected)
        weight.adapt(0.25, samples=50)
        assert weight.value == pytest.approx(expected), "at the target it stays"

    def test_a_nonfinite_kl_does_not_change_the_weight(self) -> None:
        weight = KLWeight(0.1, target=0.25, horizon=100)
        for kl in (math.nan, math.inf):
            weight.adapt(kl, samples=50)
        assert weight.value == 0.1

    def test_a_weight_without_target_does_not_change(self) -> None:
        weight = KLWeight(0.1, target=None, horizon=100)
        weight.adapt(5.0, samples=50)
        assert weight.value == 0.1


class TestObjective:
    def test_excluded_tokens_have_no_effect_even_if_nan(self) -> None:
        batch = inputs([1.1, 1.1, 1.1], [1.0, 1.0, 3.0], mask=[1, 0, 1])
        batch.advantages[1] = math.nan  # type: ignore[index]
        loss, metrics = objective(batch, settings())
        assert loss.item() == pytest.approx(-(1.1 * 1 + 1.1 * 3) / 2)
        assert metrics["actor/ratio"].item() == pytest.approx(1.1)

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

    @pytest.mark.parametrize("name", KL_ESTIMATORS.names())
    def test_straight_through_has_the_value_of_the_estimator_and_the_gradient_of_k2(self, name: str) -> None:
        batch = random_inputs(0, [5, 4])

        def kl(estimator: str, straight: bool) -> tuple[torch.Tensor, torch.Tensor]:
            value = kl_to_reference(batch, settings(kl_coef=1.0, kl_estimator=estimator, kl_straight_through=straight))
            return value.detach(), torch.autograd.grad(value.sum(), batch.log_probs)[0]

        through = kl(name, straight=True)
        torch.testing.assert_close(through[0], kl(name, straight=False)[0])
        torch.testing.assert_close(through[1], kl("mse", straight=False)[1])

    def test_an_importance_weighted_kl_is_unbiased(self) -> None:
        """arXiv 2512.02556, section 3.1: the mean over an engine's samples equals KL(policy || reference), and so does its
        gradient, although the engine has another policy. Without the weights neither holds."""
        logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64).requires_grad_()
        policy = logits.log_softmax(0)
        engine, reference = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
        batch = random_inputs(0, [3])
        batch.log_probs, batch.rollout_log_probs, batch.reference_log_probs = policy, engine, reference

        def mean(importance: bool) -> tuple[torch.Tensor, torch.Tensor]:
            config = settings(kl_coef=1.0, kl_estimator="low_var_kl", kl_importance=importance)
            value = (engine.exp() * kl_to_reference(batch, config)).sum()
            return value, torch.autograd.grad(value, logits, retain_graph=True)[0]

        exact = (policy.exp() * (policy - reference)).sum()
        (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
        torch.testing.assert_close(mean(True), (exact, slope))
        plain = mean(False)
        assert abs(plain[0] - exact) > 0.05 and (plain[1] - slope).abs().max() > 0.05

    def test_kl_weight_overrides_the_recipes_kl_coef(self) -> None:
        batch = random_inputs(3, [6])
        config = settings(kl_coef=0.1)
        (loss, metrics), (adapted, same) = objective(batch, config), objective(batch, config, kl_weight=0.3)
        assert adapted.item() - loss.item() == pytest.approx(0.2 * metrics["actor/kl_loss"].item())
        assert same["actor/kl_loss"] == metrics["actor/kl_loss"]

    def test_a_kl_in_the_reward_is_not_in_the_loss(self) -> None:
        batch = random_inputs(3, [6])
        loss, metrics = objective(batch, settings(kl_coef=0.1, kl_in_reward=True))
        assert loss == objective(batch, settings())[0] and "actor/kl_loss" not in metrics

    def test_old_log_probs_selects_the_proximal_policy(self) -> None:
        batch = random_inputs(1, [6])
        now, engines = batch.log_probs.detach(), batch.rollout_log_probs
        before, batch.old_log_probs = batch.old_log_probs, None
        current = objective(batch, settings(old_log_probs="current"))[1]
        batch.old_log_probs = now
        assert current == objective(batch, settings())[1] and current["actor/ppo_kl"] == 0
        batch.old_log_probs = None
        bypass = objective(batch, settings(old_log_probs="rollout"))[1]
        batch.old_log_probs = engines
        assert bypass == objective(batch, settings())[1] and bypass["actor/ppo_kl"] != 0
        batch.old_log_probs = before
        assert objective(batch, settings())[1] not in (current, bypass)

    def test_losses_that_need_the_old_log_prob_pass(self) -> None:
        assert runs_old_log_prob_pass(settings(loss="ppo_clip"))
        assert runs_old_log_prob_pass(settings(loss="reinforce", kl_coef=0.1, kl_in_reward=True))
        assert not runs_old_log_prob_pass(settings(loss="ppo_clip", old_log_probs="current"))
        assert not runs_old_log_prob_pass(settings(loss="reinforce"))


def sample(reward: float, finish: str = "stop", **parts: float) -> Sample:
    return Sample(0, 0, InlineData([]), 1, 1, 1, reward=reward, reward_parts=parts, finish_reason=finish)


class TestShaping:
    def test_overlong_penalty_by_hand(self) -> None:
        # max 100, buffer 20: free up to 80, half way at 90, the whole factor at 100.
        np.testing.assert_allclose(overlong_penalty(np.array([80, 90, 100]), 100, 20, 0.5), [0, -0.25, -0.5])
        np.testing.assert_array_equal(overlong_penalty(np.array([100]), 100, 0, 1.0), [0])

    def test_spread_is_a_difference_in_the_metric(self) -> None:
        assert not has_spread([sample(1.0), sample(1.0)], "reward")
        assert has_spread([sample(1.0), sample(0.0)], "reward")
        assert not has_spread([sample(0.9, accuracy=1.0), sample(1.0, accuracy=1.0)], "accuracy")
        with pytest.raises(ValueError, match="parts: accuracy"):
            has_spread([sample(0.9, accuracy=1.0)], "acc")

    def test_a_part_that_a_slow_scorer_does_not_report_is_0(self) -> None:
        slow, right = sample(0.0, accuracy=0.0, too_slow=1.0), sample(1.0, accuracy=1.0, format=1.0)
        assert has_spread([right, slow], "format") and not has_spread([slow, slow], "format")
        # Of several scorers only `geometry3k` was slow.
        labelled = sample(0.2, **{"brief": 1.0, "geometry3k": 0.0, "geometry3k/too_slow": 1.0})
        assert reward_part(labelled, "geometry3k/format", "key") == 0 and reward_part(labelled, "brief", "key") == 1
        for name in ("brief/words", "format"):
            with pytest.raises(ValueError, match=f"key names '{name}', which the reward does not report"):
                reward_part(labelled, name, "key")

    def test_a_scorer_that_omits_a_part_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"metric names 'format'.* Its parts: accuracy\. .* for every response"):
            has_spread([sample(1.0, accuracy=1.0, format=1.0), sample(0.0, accuracy=0.0)], "format")

    def test_overlong_penalty_grows_over_the_buffer_and_no_further(self) -> None:
        # max 10, buffer 4, factor 2: 6 costs nothing, each further token 1/2, and lengths above 10 cost 2.
        penalties = overlong_penalty(np.array([1, 6, 7, 9, 10, 12]), 10, 4, 2.0)
        np.testing.assert_allclose(penalties, [0, 0, -0.5, -1.5, -2, -2])
        assert overlong_penalty(np.array([9]), 10, 1, 2.0).tolist() == [0.0]

    def test_group_numbers_has_one_entry_per_sample(self) -> None:
        groups = [Group(number, "", "", [sample(0.0)] * size) for number, size in ((7, 2), (3, 1), (9, 3))]
        assert group_numbers(groups).tolist() == [7, 7, 3, 9, 9, 9]

    def test_overlong_filter(self) -> None:
        assert not counts_in_loss(sample(0.0, "length"), overlong_filter=True)
        assert counts_in_loss(sample(0.0, "length"), overlong_filter=False)
        assert counts_in_loss(sample(0.0, "stop"), overlong_filter=True)
