"""Tokens that the rollout correction rejects: no gradient reaches them, in any loss, and they change no other gradient."""

from __future__ import annotations

import math
from math import exp
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.correction import accepted_tokens, correction_scales, corrections, rejects, weight_totals
from megarl.algorithms.inputs import LossInputs, TokenSums
from megarl.algorithms.losses.covariance import covariances, threshold
from megarl.algorithms.objective import objective, trainers_policy, without_rejected
from megarl.algorithms.rejection import NAMES, Criterion, criteria
from megarl.recipe.algorithm import AlgorithmConfig, CorrectionConfig
from tests.support.loss_cases import assert_gradient, random_inputs, sequences_of, settings

LENGTHS = [9, 1, 14, 3, 6, 11]
WITHOUT_PAIRS = [name for name in LOSSES.names() if not LOSSES[name].whole_groups]
"""Preference losses learn from rows, which have no correction."""
REJECTING = {
    "token": {"reject": {"token_ratio": [0.8, 1.4]}},
    "sequence": {"reject": {"sequence_ratio": [0.7, 2.0]}},
    "mean": {"reject": {"mean_ratio": [0.9, 1.2]}},
    "worst": {"reject": {"worst_ratio": [0.6, None]}},
    "token and worst": {"reject": {"token_ratio": [0.8, 1.4], "worst_ratio": [0.5, 2.5]}},
    "k2 and k3": {"reject": {"token_k2": 0.1, "mean_k3": 0.12}},
    "negative": {"reject": {"negative_mean_ratio": [0.99, None]}},
}
WEIGHTS = ["none", "token", "sequence", "geometric"]


def config_of(loss: str, correction: dict[str, object], **values: object) -> AlgorithmConfig:
    bounds = {"gspo": 0.04, "gspo_token": 0.04, "dppo_tv": 0.06, "dppo_kl": 0.02}
    chosen = settings(loss=loss, correction=CorrectionConfig(**correction), **values)  # type: ignore[arg-type]
    chosen.clip_low = chosen.clip_high = bounds.get(loss, 0.2)
    return chosen


def batch_of(seed: int) -> LossInputs:
    """Random sequences, with a teacher's distribution for the losses that read one."""
    batch = random_inputs(seed, LENGTHS)
    top = torch.log_softmax(torch.randn(len(batch.log_probs), 4, dtype=torch.float64), 1)
    batch.top_log_probs = (top[:, :3] - 0.1).requires_grad_()
    batch.reference_top_log_probs = torch.log_softmax(torch.randn_like(top), 1)[:, :3]
    assert batch.entropy is not None
    batch.entropy.requires_grad_()
    return batch


def rejected_tokens(batch: LossInputs, config: AlgorithmConfig) -> torch.Tensor:
    policy = trainers_policy(batch, config)
    rejected = (batch.loss_mask > 0) & (accepted_tokens(batch, policy, config.correction) == 0)
    assert rejected.any() and (batch.loss_mask[~rejected] > 0).any(), "the case must have both kinds of tokens"
    return rejected


def gradients(batch: LossInputs, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Return the gradients of the objective with respect to everything that carries one."""
    assert batch.entropy is not None and batch.top_log_probs is not None
    leaves = [batch.log_probs, batch.entropy, batch.top_log_probs]
    loss, _ = objective(batch, config)
    parts = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, parts, strict=True)]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rejecting", REJECTING)
@pytest.mark.parametrize("loss", WITHOUT_PAIRS)
class TestEveryLossAndCorrection:
    def config(self, loss: str, rejecting: str, weights: str) -> AlgorithmConfig:
        correction = {"weights": weights, **REJECTING[rejecting]}
        return config_of(loss, correction, kl_coef=0.1, entropy_coef=0.01)

    def test_no_gradient_reaches_a_rejected_token(self, loss: str, rejecting: str, weights: str) -> None:
        config = self.config(loss, rejecting, weights)
        accepted_have_gradients = False
        for seed in range(3):
            batch = batch_of(seed)
            rejected = rejected_tokens(batch, config)
            for gradient in gradients(batch, config):
                assert not gradient[rejected].any()
                accepted_have_gradients |= bool(gradient[~rejected].any())
        assert accepted_have_gradients

    def test_the_policy_of_a_rejected_token_changes_no_gradient(self, loss: str, rejecting: str, weights: str) -> None:
        """Its log-prob, advantage and entropy. Its rho stays, which decides on the rejection."""
        config = self.config(loss, rejecting, weights)
        batch = batch_of(5)
        rejected = rejected_tokens(batch, config)
        expected = gradients(batch, config)
        assert batch.advantages is not None and batch.entropy is not None and batch.rollout_log_probs is not None
        with torch.no_grad():
            rho = trainers_policy(batch, config) - batch.rollout_log_probs
            for vector in (batch.log_probs, batch.advantages, batch.entropy):
                vector[rejected] = 3.0 * vector[rejected] - 0.5
            batch.rollout_log_probs = trainers_policy(batch, config) - rho
        for gradient, before in zip(gradients(batch, config), expected, strict=True):
            torch.testing.assert_close(gradient, before)


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "gmpo"])
def test_a_sequence_ratio_is_over_its_accepted_tokens(loss: str) -> None:
    """The papers' equations in float64, with the rejected tokens left out of the sequence and kept in the normalizer.

    GSPO (arXiv 2507.18071, eq. 7): s = exp(mean log-ratio). GMPO (arXiv 2507.20673, eq. 4): the same over clipped
    log-ratios. With one advantage per sequence the three differ in their clipping only.
    """
    config = config_of(loss, REJECTING["token"])
    batch = random_inputs(7, LENGTHS)
    batch.advantages = torch.tensor([1.5, -0.5, 2.0, -1.0, 0.7, -0.3], dtype=torch.float64)[sequences_of(batch)]
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    rejected = rejected_tokens(batch, config)
    remaining = ((batch.loss_mask > 0) & ~rejected).numpy()
    assert batch.old_log_probs is not None and batch.advantages is not None
    old, advantages, weights = (v.numpy() for v in (batch.old_log_probs, batch.advantages, batch.loss_weights))
    sequence = sequences_of(batch).numpy()

    def expected(p: np.ndarray) -> float:
        total = 0.0
        for number in range(len(LENGTHS)):
            tokens = np.flatnonzero((sequence == number) & remaining)
            if not tokens.size:
                continue
            a, changes = float(advantages[tokens[0]]), p[tokens] - old[tokens]
            low, high = config.clip_low, config.clip_high
            if loss == "gmpo":
                changes = [min(d, high) if a > 0 else max(d, -low) for d in changes]
                gain = a * exp(np.mean(changes))
            else:
                s = exp(np.mean(changes))
                gain = min(a * s, a * min(max(s, 1 - low), 1 + high))
            total -= float(weights[tokens].sum()) * gain
        return total

    value, _ = objective(batch, config)
    (gradient,) = torch.autograd.grad(value, batch.log_probs)
    at = batch.log_probs.detach().numpy()
    assert value.item() == pytest.approx(expected(at), rel=1e-10)
    assert_gradient(gradient, expected, at)


def test_metrics_of_sequence_ratios_cover_rejected_tokens() -> None:
    """A rejected token reports the ratio of its sequence, not 0."""
    config = config_of("gspo", REJECTING["token"])
    batch = random_inputs(8, LENGTHS)
    rejected = rejected_tokens(batch, config)
    narrowed = without_rejected(batch, config)
    _, metrics = LOSSES["gspo"].function(narrowed, config)
    ratio, sequence = metrics["actor/ratio"], sequences_of(batch)
    for token in torch.nonzero(rejected).flatten().tolist():
        same_sequence = (sequence == sequence[token]) & (batch.loss_mask > 0)
        assert torch.equal(ratio[same_sequence], ratio[token].expand(int(same_sequence.sum())))
        assert ratio[token] > 0


def test_a_token_loss_keeps_its_value_and_metrics() -> None:
    """Rejection takes gradients from token losses; the values of ratio, KL and entropy still cover every token."""
    batch = random_inputs(9, LENGTHS)
    plain = config_of("ppo_clip", {}, kl_coef=0.1, entropy_coef=0.01)
    rejecting = config_of("ppo_clip", REJECTING["token"], kl_coef=0.1, entropy_coef=0.01)
    expected, metrics = objective(batch, plain)[1], objective(batch, rejecting)[1]
    for name in ("actor/ratio", "actor/ppo_kl", "actor/pg_clipfrac", "actor/kl", "actor/kl_loss", "actor/entropy"):
        assert torch.equal(metrics[name], expected[name]), name


@pytest.mark.parametrize(
    ("rejecting", "rho", "share"),
    [
        ({"token_ratio": [0.5, 5.0]}, [1.0, 9.0, 1.0], 1 / 6),
        ({"sequence_ratio": [0.5, 5.0]}, [1.0, 9.0, 1.0], 1 / 2),
        ({"mean_ratio": [0.5, 1.5]}, [9.0, 9.0, 1.0], 1 / 2),
        ({"worst_ratio": [1e-4, None]}, [1.0, 1e-9, 1.0], 1 / 2),
        ({"worst_ratio": [1e-4, None], "token_ratio": [0.5, 5.0]}, [1.0, 1e-9, 1.0], 1 / 2),
    ],
)
def test_the_loss_and_its_metrics_are_without_rejected_tokens(
    rejecting: dict[str, Any], rho: list[float], share: float
) -> None:
    """Two sequences of three tokens have ratio 1 and advantage 1, and tokens of the first one are rejected."""
    batch = random_inputs(0, [3, 3])
    batch.loss_mask = torch.ones(6, dtype=torch.float64)
    batch.loss_weights = batch.token_share = batch.loss_mask / 6
    batch.advantages, batch.log_probs = batch.loss_mask.clone(), batch.old_log_probs.clone()  # type: ignore[union-attr]
    mismatch = torch.tensor([*rho, 1.0, 1.0, 1.0], dtype=torch.float64).log()
    batch.rollout_log_probs = batch.old_log_probs - mismatch
    loss, metrics = objective(batch, config_of("ppo_clip", {"reject": rejecting}))
    assert metrics["rollout/correction_masked"].item() == pytest.approx(share)
    assert loss.item() == metrics["actor/pg_loss"].item() == pytest.approx(-(1 - share))


class TestNormalize:
    """`normalize` divides by the mean weight of accepted tokens, or of sequences with an accepted token."""

    def scale_and_weights(self, batch: LossInputs, config: CorrectionConfig) -> tuple[float, torch.Tensor]:
        policy = batch.old_log_probs
        assert policy is not None
        (scale,) = correction_scales([np.stack([weight_totals(batch, policy, config)])])
        if rejects(config):  # as in `objective`
            batch = batch.accepting(accepted_tokens(batch, policy, config))
        return scale, corrections(batch, policy, config, scale)[0]

    @pytest.mark.parametrize("rejecting", REJECTING)
    @pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
    def test_applied_weights_have_mean_1(self, level: str, rejecting: str) -> None:
        config = CorrectionConfig(weights=level, normalize=True, **REJECTING[rejecting])  # type: ignore[arg-type]
        batch = random_inputs(10, LENGTHS)
        _, weights = self.scale_and_weights(batch, config)
        if level == "token":
            assert weights[weights > 0].mean().item() == pytest.approx(1)
            return
        sequence = sequences_of(batch)
        applied = [weights[(sequence == number) & (weights > 0)] for number in range(len(LENGTHS))]
        assert np.mean([values[0].item() for values in applied if len(values)]) == pytest.approx(1)

    def test_by_hand(self) -> None:
        """rho 0.5, 1, 1.5 and 9 (rejected; truncated at 2): the mean is 1, and 1.25 with the rejected token."""
        batch = random_inputs(0, [4])
        batch.loss_mask = torch.ones(4, dtype=torch.float64)
        assert batch.old_log_probs is not None
        batch.rollout_log_probs = batch.old_log_probs - torch.tensor([0.5, 1, 1.5, 9], dtype=torch.float64).log()
        config = CorrectionConfig(weights="token", normalize=True, reject={"token_ratio": [0.5 - 1e-9, 5.0]})
        scale, weights = self.scale_and_weights(batch, config)
        assert scale == pytest.approx(1.0)
        assert weights.tolist() == pytest.approx([0.5, 1, 1.5, 0])
        without_rejection, _ = self.scale_and_weights(batch, CorrectionConfig(weights="token", normalize=True))
        assert without_rejection == pytest.approx(1 / 1.25)

    def test_a_mini_batch_of_rejected_tokens_has_scale_1(self) -> None:
        batch = random_inputs(1, [4])
        scale, weights = self.scale_and_weights(
            batch, CorrectionConfig(weights="token", normalize=True, reject={"token_ratio": [1e8, 1e9]})
        )
        assert scale == 1.0 and not weights.any()


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_covariances_are_of_accepted_tokens(loss: str) -> None:
    """A rejected token is in neither mean and is not selected, so it takes no accepted token's place."""
    config = config_of(loss, REJECTING["token"], cov_share=0.3, cov_low=-9.0, cov_high=9.0)
    batch = random_inputs(11, LENGTHS)
    rejected = rejected_tokens(batch, config)
    remaining = ((batch.loss_mask > 0) & ~rejected).numpy()
    narrowed = without_rejected(batch, config)
    sums = TokenSums.of(narrowed)
    assert sums.tokens == remaining.sum() and batch.advantages is not None
    p, a = (vector.detach().numpy()[remaining] for vector in (batch.log_probs, batch.advantages))
    np.testing.assert_allclose(covariances(narrowed, sums)[remaining], (p - p.mean()) * (a - a.mean()), rtol=1e-9)
    selection = LOSSES[loss].selection
    assert selection is not None
    scores = selection.scores(narrowed, sums, np.random.default_rng(0).random(sum(LENGTHS)), config)
    count = sums.count(0.3)
    chosen = scores >= threshold([np.sort(scores)[-count:]], count)
    assert count == int(0.3 * remaining.sum()) and chosen.sum() == count
    assert not chosen[~remaining].any()


def test_a_token_with_a_broken_log_prob_is_rejected() -> None:
    batch = random_inputs(12, [5, 4])
    batch.loss_mask = torch.ones_like(batch.loss_mask)
    assert batch.rollout_log_probs is not None
    batch.rollout_log_probs[2] = math.nan
    loss, _ = objective(batch, config_of("gspo", {"reject": {"token_ratio": [None, 1e9]}}))
    (gradient,) = torch.autograd.grad(loss, batch.log_probs)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and gradient[2] == 0


class TestCriteria:
    """Every criterion against its definition, one token and one sequence at a time."""

    LIMITS: ClassVar[dict[str, Any]] = {"ratio": [0.9, 1.15], "k2": 0.02, "k3": 0.01}

    @staticmethod
    def measure(name: str, d: np.ndarray) -> np.ndarray:
        return {"ratio": np.exp(d), "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[name]

    def passes(self, span: str, name: str, d: np.ndarray, token: int, counted: np.ndarray) -> bool:
        """Return whether `token` of one sequence with log-ratios `d` and loss tokens `counted` is within `LIMITS`."""
        limit = self.LIMITS[name]
        low, high = limit if isinstance(limit, list) else (-math.inf, limit)
        if span == "token":
            values = self.measure(name, d[[token]])
        elif span == "worst":
            values = self.measure(name, d[counted])
        elif name == "ratio":  # the product, or the geometric mean
            total = d[counted].sum()
            values = np.exp([total if span == "sequence" else total / counted.sum()])
        else:
            values = self.measure(name, d[counted])
            values = np.array([values.sum() if span == "sequence" else values.mean()])
        return bool(np.all((low <= values) & (values <= high)))

    @pytest.mark.parametrize("name", NAMES)
    def test_by_definition(self, name: str) -> None:
        span, measure = name.removeprefix("negative_").split("_")
        batch = random_inputs(20, [5, 1, 8, 3, 6])
        batch.loss_mask[sequences_of(batch) == 1] = 0.0
        assert batch.old_log_probs is not None and batch.rollout_log_probs is not None and batch.advantages is not None
        gaps = torch.tensor([0.1, 1.0, 0.02, 1.0, 0.4], dtype=torch.float64)[sequences_of(batch)]
        batch.rollout_log_probs = batch.old_log_probs - gaps * (batch.old_log_probs - batch.rollout_log_probs)
        config = CorrectionConfig(reject={name: self.LIMITS[measure]})
        got = accepted_tokens(batch, batch.old_log_probs, config).numpy()
        d = (batch.old_log_probs - batch.rollout_log_probs).numpy()
        mask, sequence = batch.loss_mask.numpy() > 0, sequences_of(batch).numpy()
        expected = np.zeros(len(d))
        for token in np.flatnonzero(mask):
            members = np.flatnonzero(sequence == sequence[token])
            inside = self.passes(span, measure, d[members], int(token - members[0]), mask[members])
            exempt = name.startswith("negative_") and batch.advantages[token] >= 0
            expected[token] = float(inside or exempt)
        np.testing.assert_array_equal(got, expected)
        assert 0 < got.sum() < mask.sum(), "the case must have both kinds of tokens"

    def test_deepseek_v32_masks_bad_sequences_that_the_policy_has_left(self) -> None:
        """arXiv 2512.02556, equation 9: A < 0 and mean log(p engine / p trainer) > 0.5 has no loss."""
        batch = random_inputs(0, [2, 2, 2])
        batch.loss_mask = torch.ones(6, dtype=torch.float64)
        batch.advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
        assert batch.old_log_probs is not None
        left = torch.tensor([0.7, 0.4, 0.5, 0.4, 2.0, 2.0], dtype=torch.float64)  # means 0.55, 0.45 and 2
        batch.rollout_log_probs = batch.old_log_probs + left
        config = CorrectionConfig(reject={"negative_mean_ratio": [exp(-0.5), None]})
        assert accepted_tokens(batch, batch.old_log_probs, config).tolist() == [0, 0, 1, 1, 1, 1]

    def test_a_criterion_of_null_is_off(self) -> None:
        assert not rejects(CorrectionConfig(reject={"mean_k3": None}))
        assert criteria({"mean_k3": None, "token_ratio": [None, 2.0]}) == [
            Criterion("token", "ratio", -math.inf, math.log(2.0))
        ]
