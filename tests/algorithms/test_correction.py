"""Rollout correction and mismatch metrics against numbers worked by hand and slow references."""

from __future__ import annotations

import math
from math import log

import numpy as np
import pytest
import torch

from megarl.algorithms.correction import (
    Mismatch,
    correction_scales,
    corrections,
    corrects,
    total_mismatch,
    weight_totals,
)
from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import objective
from megarl.algorithms.rejection import of_icepop
from megarl.recipe.algorithm import CorrectionConfig
from tests.support.loss_cases import correcting, inputs, part_of, random_inputs, sequences_of, settings


def mismatched(
    rho: list[float], lengths: list[int], mask: list[float] | None = None
) -> tuple[LossInputs, torch.Tensor]:
    """A batch with trainer log-probs of -1, and engine log-probs that give rho = p(trainer) / p(engine)."""
    batch = inputs([1.0] * len(rho), [1.0] * len(rho), mask=mask, lengths=lengths)
    policy = torch.full((len(rho),), -1.0, dtype=torch.float64)
    batch.rollout_log_probs = policy - torch.tensor(rho, dtype=torch.float64).log()
    return batch, policy


def weights(batch: LossInputs, policy: torch.Tensor, scale: float = 1.0, **values: object) -> list[float]:
    return corrections(batch, policy, CorrectionConfig(**values), scale)[0].tolist()  # type: ignore[arg-type]


class TestByHand:
    """Sequences of rho 2 and 0.5 and 3 (one excluded token between), and of 0.5 and 0.5."""

    batch, policy = mismatched([2.0, 0.5, 99.0, 3.0, 0.5, 0.5], [4, 2], mask=[1, 1, 0, 1, 1, 1])
    counted = (0, 1, 3, 4, 5)

    def of(self, **values: object) -> list[float]:
        computed = weights(self.batch, self.policy, **values)
        return [computed[token] for token in self.counted]

    def test_weights_of_tokens(self) -> None:
        assert self.of(weights="token") == pytest.approx([2, 0.5, 2, 0.5, 0.5])
        assert self.of(weights="token", truncate=2.5) == pytest.approx([2, 0.5, 2.5, 0.5, 0.5])

    def test_weights_of_sequences(self) -> None:
        assert self.of(weights="sequence", truncate=5) == pytest.approx([3, 3, 3, 0.25, 0.25])  # 2 * 0.5 * 3; 0.5^2
        assert self.of(weights="sequence") == pytest.approx([2, 2, 2, 0.25, 0.25])

    def test_weights_by_geometric_mean(self) -> None:
        root = 3 ** (1 / 3)
        assert self.of(weights="geometric") == pytest.approx([root, root, root, 0.5, 0.5])

    def test_rejection_of_tokens(self) -> None:
        assert self.of(reject={"token_ratio": [0.6, 2.5]}) == [1, 0, 0, 0, 0]
        assert self.of(reject={"token_ratio": [0.4, 1.9]}) == [0, 1, 0, 1, 1]

    def test_rejection_of_sequences(self) -> None:
        assert self.of(reject={"sequence_ratio": [0.2, 2.9]}) == [0, 0, 0, 1, 1]
        assert self.of(reject={"mean_ratio": [0.6, 2.9]}) == [1, 1, 1, 0, 0]

    def test_ice_pop_weights_the_tokens_that_it_keeps(self) -> None:
        config = of_icepop(CorrectionConfig(icepop=[0.6, 5.0]))
        assert self.of(**config) == pytest.approx([2, 0, 3, 0, 0])

    def test_the_worst_token_rejects_its_sequence(self) -> None:
        batch, policy = mismatched([1.0, 1e-5, 1.0, 1.0, 1e-5], [3, 2], mask=[1, 1, 1, 1, 0])
        assert weights(batch, policy, reject={"worst_ratio": [1e-4, None]}) == [0, 0, 0, 1, 0]
        assert weights(batch, policy, reject={"worst_ratio": [1e-6, None]})[:4] == [1, 1, 1, 1]

    def test_metrics(self) -> None:
        config = CorrectionConfig(weights="token", reject={"token_ratio": [0.6, 5.0]})
        _, metrics = corrections(self.batch, self.policy, config, 1.0)
        of_counted = {name: [values.tolist()[token] for token in self.counted] for name, values in metrics.items()}
        assert of_counted["rollout/correction_weight"] == pytest.approx([2, 0.5, 2, 0.5, 0.5]), "before the rejection"
        assert of_counted["rollout/correction_truncated"] == [0, 0, 1, 0, 0]
        assert of_counted["rollout/correction_masked"] == [0, 1, 0, 1, 1]


def test_limits_are_inclusive() -> None:
    batch, policy = mismatched([1.0], [1])
    assert weights(batch, policy, reject={"token_ratio": [1.0, 2.0]}) == [1]
    assert weights(batch, policy, reject={"token_ratio": [0.5, 1.0]}) == [1]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalized_weights_have_mean_1_over_any_split_of_the_mini_batch(level: str) -> None:
    """The mean is over loss tokens, or over sequences with loss tokens for weights of sequences."""
    batch = random_inputs(0, [6, 3, 9, 4, 1])
    batch.loss_mask[sequences_of(batch) == 3] = 0.0
    config = CorrectionConfig(weights=level, normalize=True)  # type: ignore[arg-type]
    policy = batch.log_probs.detach()
    parts = [part_of(batch, numbers) for numbers in ([0, 4], [1, 2], [3])]
    totals = [np.stack([weight_totals(part, part.log_probs, config)]) for part in parts]
    (scale,) = correction_scales([totals[0], None, *totals[1:]])
    (at_once,) = correction_scales([np.stack([weight_totals(batch, policy, config)])])
    assert scale == pytest.approx(at_once)
    factors = corrections(batch, policy, config, scale)[0]
    counted = batch.loss_mask > 0
    if level == "token":
        assert factors[counted].mean().item() == pytest.approx(1)
    else:
        by_sequence = [factors[counted & (sequences_of(batch) == number)] for number in range(5)]
        assert np.mean([values[0].item() for values in by_sequence if len(values)]) == pytest.approx(1)


def test_a_mini_batch_without_loss_tokens_has_scale_1() -> None:
    assert correction_scales([np.array([[0.0, 0.0], [4.0, 2.0]])]) == [1.0, 0.5]


class TestInTheObjective:
    def test_weights_multiply_the_loss_and_its_gradient_and_not_the_kl(self) -> None:
        batch = random_inputs(1, [5, 6])
        plain = settings(loss="reinforce", kl_coef=0.3)
        corrected = correcting(weights="token", truncate=1.5)
        corrected.loss, corrected.kl_coef = "reinforce", 0.3
        assert batch.rollout_log_probs is not None and batch.advantages is not None
        rho = (batch.log_probs - batch.rollout_log_probs).detach().exp().clamp(max=1.5)
        (got,) = torch.autograd.grad(objective(batch, corrected)[0], batch.log_probs)
        batch.advantages = batch.advantages * rho
        (expected,) = torch.autograd.grad(objective(batch, plain)[0], batch.log_probs)
        torch.testing.assert_close(got, expected)
        assert objective(batch, corrected)[1]["actor/kl_loss"] == objective(batch, plain)[1]["actor/kl_loss"]

    def test_correction_uses_the_policy_before_the_update(self) -> None:
        batch = random_inputs(2, [5, 6])
        config = correcting(weights="token")
        _, metrics = objective(batch, config)
        assert batch.old_log_probs is not None and batch.rollout_log_probs is not None
        rho = (batch.old_log_probs - batch.rollout_log_probs).exp().clamp(max=2.0)
        expected = rho[batch.loss_mask > 0].mean()
        torch.testing.assert_close(metrics["rollout/correction_weight"], expected)

    def test_a_rejected_token_has_no_loss_and_counts_in_the_normalizer(self) -> None:
        batch, policy = mismatched([1.0, 9.0, 1.0], [3])
        batch.old_log_probs = policy
        batch.log_probs = policy.clone().requires_grad_()
        loss, _ = objective(batch, correcting(reject={"token_ratio": [0.5, 5.0]}))
        assert loss.item() == pytest.approx(-2 / 3)
        (gradient,) = torch.autograd.grad(loss, batch.log_probs)
        torch.testing.assert_close(gradient, torch.tensor([-1 / 3, 0, -1 / 3], dtype=torch.float64))

    def test_masking_without_weights_in_bypass_mode_uses_the_current_policy(self) -> None:
        batch, policy = mismatched([1.0, 9.0], [2])
        batch.old_log_probs, batch.log_probs = None, policy.clone().requires_grad_()
        config = correcting(reject={"token_ratio": [0.5, 5.0]})
        config.old_log_probs = "rollout"
        assert objective(batch, config)[1]["rollout/correction_masked"].item() == 0.5

    def test_correction_is_off_by_default(self) -> None:
        assert not corrects(CorrectionConfig())
        assert corrects(CorrectionConfig(weights="token")) and corrects(CorrectionConfig(reject={"mean_k3": 0.1}))
        assert not corrects(CorrectionConfig(reject={"mean_k3": None}))
        _, metrics = objective(random_inputs(3, [4]), settings())
        assert not any(name.startswith("rollout/correction") for name in metrics)


class TestMismatch:
    def test_by_hand(self) -> None:
        """rho 2, 1/2 and an excluded token; then 4: d = ln 2, -ln 2, 2 ln 2. Squares 4, 1/4, 16; of sequences 1 and 16."""
        batch, policy = mismatched([2.0, 0.5, 77.0, 4.0], [3, 1], mask=[1, 1, 0, 1])
        two = log(2)
        assert Mismatch.of(batch, policy).metrics(0) == {
            "rollout/logprob_gap_mean": pytest.approx(4 * two / 3),
            "rollout/logprob_gap_max": pytest.approx(2 * two),
            "rollout/logprob_gap_k1": pytest.approx(-2 * two / 3),
            "rollout/logprob_gap_k3": pytest.approx((6.5 - 2 * two - 3) / 3),
            "rollout/mismatch_chi2_token": pytest.approx(20.25 / 3 - 1),
            "rollout/mismatch_chi2_sequence": pytest.approx(17 / 2 - 1),
            "rollout/mismatch_ess": pytest.approx(6.5**2 / (3 * 20.25)),
        }

    def test_parts_add_up(self) -> None:
        batch = random_inputs(4, [6, 3, 9, 4])
        whole = Mismatch.of(batch, batch.log_probs).metrics(0)
        parts = [part_of(batch, numbers) for numbers in ([2], [0, 3], [1])]
        together = total_mismatch([None, *(Mismatch.of(part, part.log_probs) for part in parts)])
        assert together.metrics(0) == pytest.approx(whole)

    def test_the_gap_by_lag(self) -> None:
        """Versions 3, 5, 5, excluded; then 3 in another part: lags 2 and 0 of a policy of version 5."""
        batch, policy = mismatched([2.0, 0.5, 4.0, 77.0], [3, 1], mask=[1, 1, 1, 0])
        other, other_policy = mismatched([8.0], [1])
        batch.versions, other.versions = torch.tensor([3.0, 5.0, 5.0, 9.0]), torch.tensor([3.0])
        metrics = total_mismatch([Mismatch.of(batch, policy), Mismatch.of(other, other_policy)]).metrics(5)
        gaps = {name: value for name, value in metrics.items() if "by_lag" in name}
        assert gaps == {
            "rollout/logprob_gap_by_lag/0": pytest.approx(3 * log(2) / 2),
            "rollout/logprob_gap_by_lag/2": pytest.approx(4 * log(2) / 2),
        }
        assert metrics["rollout/logprob_gap_mean"] == pytest.approx(7 * log(2) / 4)

    def test_equal_policies_have_no_mismatch(self) -> None:
        batch, policy = mismatched([1.0] * 5, [3, 2])
        metrics = Mismatch.of(batch, policy).metrics(0)
        assert metrics.pop("rollout/mismatch_ess") == 1
        assert set(metrics.values()) == {0}

    def test_a_batch_without_loss_tokens_has_no_metrics(self) -> None:
        batch, policy = mismatched([2.0, 3.0], [2])
        batch.loss_mask.zero_()
        assert total_mismatch([None, Mismatch.of(batch, policy)]).metrics(0) == {}

    @pytest.mark.parametrize("broken", [0, 1, 2])
    def test_a_nan_token_makes_every_metric_nan(self, broken: int) -> None:
        batch, policy = mismatched([2.0, 0.5, 4.0], [2, 1])
        policy[broken] = math.nan
        whole = Mismatch.of(batch, policy)
        parts = [part_of(batch, [0]), part_of(batch, [1])]
        together = total_mismatch(
            Mismatch.of(part, part_policy) for part, part_policy in zip(parts, (policy[:2], policy[2:]), strict=True)
        )
        for metrics in (whole.metrics(0), together.metrics(0)):
            assert all(math.isnan(value) for value in metrics.values()), metrics

    def test_extremes_stay_finite(self) -> None:
        batch, policy = mismatched([1.0, 1.0], [2])
        policy[0] = 500.0
        assert all(math.isfinite(value) for value in Mismatch.of(batch, policy).metrics(0).values())
