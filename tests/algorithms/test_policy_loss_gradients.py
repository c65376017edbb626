"""Policy losses against slow references with finite-difference gradients, and properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import exp, log

import numpy as np
import pytest
import torch

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import objective
from megarl.recipe.algorithm import AlgorithmConfig
from tests.support.loss_cases import assert_gradient, part_of, random_inputs, sequences_of, settings

OF_TOKENS = [name for name in LOSSES.names() if not LOSSES[name].whole_groups and not LOSSES[name].needs_top]
"""Other tests: tests/algorithms/test_preference_losses.py (pairs), test_squared_losses.py (groups), tests/rollout/test_distillation.py (a teacher's distribution)."""

# Slow references: one token, or one sequence, at a time. `p` are the log-probs that are differentiated, `fixed` the same
# numbers where the equation stops the gradient.
Numbers = list[float]
Reference = Callable[[Numbers, Numbers, Numbers, Numbers, AlgorithmConfig], Numbers]


def by_token(token_loss: Callable[[float, float, float, float, AlgorithmConfig], float]) -> Reference:
    def of(p: Numbers, fixed: Numbers, old: Numbers, a: Numbers, s: AlgorithmConfig) -> Numbers:
        return [token_loss(*token, s) for token in zip(p, fixed, old, a, strict=True)]

    return of


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(ratio: float, a: float, s: AlgorithmConfig) -> float:
    gain = min(ratio * a, clip(ratio, 1 - s.clip_low, 1 + s.clip_high) * a)
    return -max(gain, s.dual_clip * a) if s.dual_clip is not None and a < 0 else -gain


@by_token
def slow_ppo(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    return surrogate(exp(p - old), a, s)


@by_token
def slow_cispo(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    return -clip(exp(fixed - old), 1 - s.clip_low, 1 + s.clip_high) * a * p


@by_token
def slow_sapo(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    tau = s.tau_positive if a > 0 else s.tau_negative
    return -a * 4 / tau / (1 + exp(-tau * (exp(p - old) - 1)))


@by_token
def slow_dppo_tv(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    distance, away = abs(exp(fixed) - exp(old)), (fixed > old) == (a > 0)
    if away and distance > (s.clip_high if a > 0 else s.clip_low):
        return 0.0
    return -min(exp(fixed - old), s.ratio_cap) * a * p


@by_token
def slow_dro(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    return -(a * p - s.log_ratio_coef * (p - old) ** 2)


@by_token
def slow_dppo_kl(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    q, now, away = exp(old), exp(fixed), (fixed > old) == (a > 0)
    distance = q * log(q / now) + (1 - q) * log((1 - q) / (1 - now))
    if away and distance > (s.clip_high if a > 0 else s.clip_low):
        return 0.0
    return -min(exp(fixed - old), s.ratio_cap) * a * p


@by_token
def slow_reinforce(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    return -a * p


@by_token
def slow_sft(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    return -p


@by_token
def slow_ratio(p: float, fixed: float, old: float, a: float, s: AlgorithmConfig) -> float:
    return -exp(p - old) * a


def slow_gspo(p: Numbers, fixed: Numbers, old: Numbers, a: Numbers, s: AlgorithmConfig) -> Numbers:
    ratio = math.prod(exp(x - y) for x, y in zip(p, old, strict=True)) ** (1 / len(p))
    return [surrogate(ratio, advantage, s) for advantage in a]


def slow_gspo_token(p: Numbers, fixed: Numbers, old: Numbers, a: Numbers, s: AlgorithmConfig) -> Numbers:
    ratio = math.prod(exp(x - y) for x, y in zip(fixed, old, strict=True)) ** (1 / len(p))
    return [surrogate(ratio * exp(x - y), advantage, s) for x, y, advantage in zip(p, fixed, a, strict=True)]


def slow_gmpo(p: Numbers, fixed: Numbers, old: Numbers, a: Numbers, s: AlgorithmConfig) -> Numbers:
    """Each factor is the ratio to the sign of A, clipped above alone, as the paper writes it; the root over them."""
    product = 1.0
    for x, y, advantage in zip(p, old, a, strict=True):
        sign = 1.0 if advantage > 0 else -1.0
        ratio = exp(x - y)
        product *= min(ratio**sign, clip(ratio, exp(-s.clip_low), exp(s.clip_high)) ** sign) ** sign
    return [-sum(a) / len(a) * product ** (1 / len(p))] * len(p)


def slow_sppo(p: Numbers, fixed: Numbers, old: Numbers, a: Numbers, s: AlgorithmConfig) -> Numbers:
    return [(sum(p) - sum(old) - s.sppo_eta * sum(a) / len(a)) ** 2] * len(p)


SLOW: dict[str, Reference] = {
    "ppo_clip": slow_ppo, "cispo": slow_cispo, "sapo": slow_sapo, "dppo_tv": slow_dppo_tv, "dppo_kl": slow_dppo_kl,
    "gspo": slow_gspo, "gspo_token": slow_gspo_token, "gmpo": slow_gmpo, "reinforce": slow_reinforce, "sft": slow_sft,
    "clip_cov": slow_ppo, "kl_cov": slow_ratio, "dro": slow_dro, "m2po": slow_ratio, "sppo": slow_sppo,
}  # fmt: skip
# Of selected tokens, from the reference's loss, log-prob and old log-prob.
OF_SELECTED: dict[str, Callable[[float, float, float], float]] = {
    "clip_cov": lambda loss, p, old: 0.0,
    "m2po": lambda loss, p, old: 0.0,
    "kl_cov": lambda loss, p, old: loss + 0.7 * abs(p - old),
}
# Bounds at which about a third of the tokens are clipped.
SETTINGS: dict[str, dict[str, object]] = {
    "ppo_clip": {"dual_clip": 1.5},
    "cispo": {"clip_low": 0.1, "clip_high": 0.3},
    "sapo": {"tau_positive": 0.8, "tau_negative": 2.0},
    "dppo_tv": {"clip_low": 0.04, "clip_high": 0.06, "ratio_cap": 1.3},
    "dro": {"log_ratio_coef": 0.7},
    "dppo_kl": {"clip_low": 0.01, "clip_high": 0.02, "ratio_cap": 1.3},
    "gspo": {"clip_low": 0.02, "clip_high": 0.04},
    "gspo_token": {"clip_low": 0.02, "clip_high": 0.04},
    "gmpo": {"clip_low": 0.3, "clip_high": 0.2},
    "kl_cov": {"cov_kl_coef": 0.7},
    "sppo": {"sppo_eta": 0.7},
}


def slow_objective(batch: LossInputs, name: str, config: AlgorithmConfig, p: np.ndarray) -> float:
    """The weighted sum of the reference's losses over the loss tokens, at log-probs `p`."""
    assert batch.old_log_probs is not None and batch.advantages is not None
    total = 0.0
    for number in range(len(batch.lengths)):
        counted = ((sequences_of(batch) == number) & (batch.loss_mask > 0)).numpy()
        if counted.any():
            fixed, old, a, weights = (
                vector.detach().numpy()[counted].tolist()
                for vector in (batch.log_probs, batch.old_log_probs, batch.advantages, batch.loss_weights)
            )
            losses = SLOW[name](p[counted].tolist(), fixed, old, a, config)
            if name in OF_SELECTED:
                assert batch.selected is not None
                numbers = zip(batch.selected.numpy()[counted], losses, p[counted], old, strict=True)
                losses = [OF_SELECTED[name](*rest) if selected else rest[0] for selected, *rest in numbers]
            total += sum(w * x for w, x in zip(weights, losses, strict=True))
    return total


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_value_and_gradient_equal_the_slow_reference(name: str, seed: int) -> None:
    """The gradient by central differences of the reference, at points that no bound is within 1e-6 of."""
    batch = random_inputs(seed, [9, 1, 14, 3, 6])
    config = settings(loss=name, **SETTINGS.get(name, {}))
    loss, metrics = objective(batch, config)
    at = batch.log_probs.detach().numpy()
    assert loss.item() == pytest.approx(slow_objective(batch, name, config, at), rel=1e-10)
    (grad,) = torch.autograd.grad(loss, batch.log_probs)
    assert_gradient(grad, lambda p: slow_objective(batch, name, config, p), at)
    if name in ("ppo_clip", "cispo", "dppo_tv", "dppo_kl", "gspo", "gspo_token", "gmpo"):
        assert 0.05 < metrics["actor/pg_clipfrac"].item() < 0.95, "the case must have tokens on both sides"


@pytest.mark.parametrize("name", OF_TOKENS)
class TestProperties:
    def config(self, name: str) -> AlgorithmConfig:
        return settings(loss=name, kl_coef=0.1, entropy_coef=0.01, **SETTINGS.get(name, {}))

    def of(self, batch: LossInputs, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        loss, metrics = objective(batch, self.config(name))
        (grad,) = torch.autograd.grad(loss, batch.log_probs)
        return loss.detach(), metrics, grad

    def test_splits_add_up_and_order_does_not_matter(self, name: str) -> None:
        batch = random_inputs(2, [5, 9, 1, 7])
        whole, metrics, grad = self.of(batch, name)
        parts = [[3], [1, 0], [2]]
        results = [self.of(part_of(batch, part), name) for part in parts]
        torch.testing.assert_close(sum(result[0] for result in results), whole)
        for key, value in metrics.items():
            torch.testing.assert_close(sum(result[1][key] for result in results), value)
        for part, result in zip(parts, results, strict=True):
            expected = torch.cat([grad[sequences_of(batch) == number] for number in part])
            torch.testing.assert_close(result[2], expected)

    @pytest.mark.parametrize("junk", [-50.0, math.inf, math.nan])
    def test_excluded_tokens_have_no_effect_for_any_value(self, name: str, junk: float) -> None:
        """Their gradients are 0 too: in a backward pass, 0 x NaN brings back a NaN that the forward sum excludes."""
        batch = random_inputs(3, [6, 8])
        expected, metrics, grad = self.of(batch, name)
        masked = batch.loss_mask == 0
        vectors = (batch.log_probs, batch.old_log_probs, batch.advantages, batch.reference_log_probs, batch.entropy)
        for vector in vectors:
            assert vector is not None
            with torch.no_grad():
                vector[masked] = junk
        other, other_metrics, gradients = self.of(batch, name)
        torch.testing.assert_close(other, expected)
        torch.testing.assert_close(other_metrics, metrics)
        torch.testing.assert_close(gradients, grad)
        assert not gradients[masked].any()

    def test_a_batch_without_loss_tokens_has_loss_zero(self, name: str) -> None:
        batch = random_inputs(4, [4, 3])
        for vector in (batch.loss_mask, batch.loss_weights, batch.token_share):
            vector.zero_()
        loss, metrics, grad = self.of(batch, name)
        assert loss == 0 and not grad.any() and not any(value.any() for value in metrics.values())

    def test_extremes_stay_finite(self, name: str) -> None:
        batch = random_inputs(5, [4, 4])
        with torch.no_grad():
            batch.log_probs[1], batch.log_probs[6] = -300.0, -1e-9
            assert batch.old_log_probs is not None
            batch.old_log_probs[6] = -300.0
        loss, metrics, grad = self.of(batch, name)
        assert torch.isfinite(loss) and torch.isfinite(grad).all()
        assert all(torch.isfinite(value) for value in metrics.values())
