"""Policy losses against numbers worked by hand. tests/algorithms/test_policy_loss_gradients.py compares them with slow references."""

from __future__ import annotations

import math
from math import exp, log

import pytest
import torch

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import objective
from tests.support.loss_cases import inputs, random_inputs, sequences_of, settings


def token_loss(batch: LossInputs, name: str, **values: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return LOSSES[name].function(batch, settings(loss=name, **values))


def close(got: torch.Tensor | None, expected: list[float]) -> None:
    assert got is not None
    torch.testing.assert_close(got.detach(), torch.tensor(expected, dtype=torch.float64))


def gradient(batch: LossInputs, loss: torch.Tensor) -> torch.Tensor:
    (gradient_of_losses,) = torch.autograd.grad(loss.sum(), batch.log_probs)
    return gradient_of_losses


class TestPPOClip:
    def test_by_hand(self) -> None:
        # low 0.2, high 0.28. Columns: inside; above with A > 0 (clipped to 1.28); above with A < 0 (kept);
        # below with A > 0 (kept); below with A < 0 (clipped to 0.8).
        batch = inputs([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
        loss, metrics = token_loss(batch, "ppo_clip", clip_high=0.28)
        close(loss, [-2.2, -2.56, 3.0, -1.0, 1.6])
        assert metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 0, 1]
        close(metrics["actor/ratio"], [1.1, 1.5, 1.5, 0.5, 0.5])
        close(metrics["actor/ppo_kl"], [-log(1.1), -log(1.5), -log(1.5), log(2), log(2)])
        close(gradient(batch, loss), [-2.2, 0.0, 3.0, -1.0, 0.0])  # -A ratio where not clipped, else 0

    def test_dual_clip_bounds_the_loss_of_bad_samples(self) -> None:
        batch = inputs([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
        loss, metrics = token_loss(batch, "ppo_clip", dual_clip=3.0)
        close(loss, [3.0, -1.2, 2.0])
        assert metrics["actor/pg_clipfrac_lower"].tolist() == [1, 0, 0]
        close(gradient(batch, loss), [0.0, 0.0, 2.0])


def test_cispo_by_hand() -> None:
    # Weights 1.1, 1.28 (clipped), 0.8 (clipped); loss -w A log p; the clipped ones keep their gradient, -w A.
    batch = inputs([1.1, 1.5, 0.5], [2.0, 2.0, -1.0])
    loss, metrics = token_loss(batch, "cispo", clip_high=0.28)
    close(loss, [-2.2 * log(1.1), -2.56 * log(1.5), 0.8 * log(0.5)])
    close(gradient(batch, loss), [-2.2, -2.56, 0.8])
    assert metrics["actor/pg_clipfrac"].tolist() == [0, 1, 1]


def test_sapo_by_hand() -> None:
    # With ratio 1 the gate's value is 2 / tau and the gradient is the policy gradient, -A. At ratio 2 with tau 1:
    # 4 sigmoid(1) = 4 / (1 + e^-1); with A < 0 and tau 2: 2 sigmoid(2).
    batch = inputs([1.0, 1.0, 2.0, 2.0, 2.0], [3.0, -3.0, 1.0, -1.0, 0.0])
    loss, _ = token_loss(batch, "sapo", tau_positive=1.0, tau_negative=2.0)
    close(loss, [-6.0, 3.0, -4 / (1 + exp(-1)), 2 / (1 + exp(-2)), 0.0])
    close(gradient(batch, loss)[:2], [-3.0, 3.0])


def test_dppo_tv_by_hand() -> None:
    """Old probability 0.5. Moves of 0.1 and 0.3 up, 0.1 and 0.3 down, bounds 0.2: only a move past its bound in A's
    own direction is left out; the weight is the ratio, at most 1.1 here."""
    batch = inputs([0.6, 0.8, 0.4, 0.2, 0.8, 0.2], [1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    batch.old_log_probs = torch.full((6,), 0.5, dtype=torch.float64).log()
    loss, metrics = token_loss(batch, "dppo_tv", clip_low=0.2, clip_high=0.2, ratio_cap=1.1)
    close(loss, [-1.1 * log(0.6), 0, 0.8 * log(0.4), 0, 1.1 * log(0.8), -0.4 * log(0.2)])
    assert metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 1, 0, 0]
    close(gradient(batch, loss), [-1.1, 0, 0.8, 0, 1.1, -0.4])


def test_dppo_with_a_squared_log_ratio_by_hand() -> None:
    """prime-rl's default loss: -A ratio inside the trust region, and kl_tau (log ratio)^2 for every token."""
    batch = inputs([0.6, 0.8], [1.0, 1.0])
    batch.old_log_probs = torch.full((2,), 0.5, dtype=torch.float64).log()
    loss, metrics = token_loss(batch, "dppo_tv", clip_low=0.2, clip_high=0.2, log_ratio_coef=0.5)
    assert metrics["actor/pg_clipfrac"].tolist() == [0, 1]
    close(loss, [-1.2 * log(0.6) + 0.5 * log(1.2) ** 2, 0.5 * log(1.6) ** 2])
    close(gradient(batch, loss), [-1.2 + log(1.2), log(1.6)])  # the policy gradient at its ratio + 2 c log ratio


def test_dro_by_hand() -> None:
    batch = inputs([2.0, 0.5], [1.0, -1.0])
    loss, _ = token_loss(batch, "dro", log_ratio_coef=0.25)
    close(loss, [-log(2) + 0.25 * log(2) ** 2, -log(2) + 0.25 * log(2) ** 2])
    close(gradient(batch, loss), [-1 + 0.5 * log(2), 1 - 0.5 * log(2)])


def test_dppo_kl_by_hand() -> None:
    """q = 0.5: KL of p = 0.6 is (log(0.5/0.6) + log(0.5/0.4)) / 2 = 0.0204; of 0.8 and 0.2: 0.2231."""
    batch = inputs([0.6, 0.8, 0.4, 0.2, 0.8, 0.2], [1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    batch.old_log_probs = torch.full((6,), 0.5, dtype=torch.float64).log()
    tight = {"clip_low": 0.022, "clip_high": 0.022}
    assert token_loss(batch, "dppo_kl", **tight)[1]["actor/pg_clipfrac"].tolist() == [0, 1, 0, 1, 0, 0]
    wide = {"clip_low": 0.224, "clip_high": 0.222}  # the bound of each side is its own
    loss, metrics = token_loss(batch, "dppo_kl", **wide)
    assert metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 0, 0, 0]
    close(loss, [-1.2 * log(0.6), 0, 0.8 * log(0.4), 0.4 * log(0.2), 1.6 * log(0.8), -0.4 * log(0.2)])


def test_gspo_by_hand() -> None:
    # Sequence of ratios 1.2 and 0.9 (and an excluded 7): s = sqrt(1.08); another of 2 and 2: s = 2, clipped to 1.28.
    batch = inputs([1.2, 7.0, 0.9, 2.0, 2.0], [1, 1, 1, 3, 3], mask=[1, 0, 1, 1, 1], lengths=[3, 2])
    loss, metrics = token_loss(batch, "gspo", clip_high=0.28)
    s = math.sqrt(1.08)
    close(loss[[0, 2, 3, 4]], [-s, -s, -3.84, -3.84])
    assert metrics["actor/pg_clipfrac"][[0, 2, 3, 4]].tolist() == [0, 0, 1, 1]
    close(gradient(batch, loss[[0, 2]]), [-s, 0, -s, 0, 0])  # two tokens of -s, each with half of each one's gradient


def test_gspo_token_uses_each_tokens_advantage() -> None:
    batch = inputs([1.2, 0.9], [1.0, -2.0], lengths=[2])
    loss, _ = token_loss(batch, "gspo_token")
    s = math.sqrt(1.08)
    close(loss, [-s, 2 * s])
    close(gradient(batch, loss), [-s, 2 * s])


def test_gmpo_by_hand() -> None:
    # A > 0: log-ratios log 2 (clipped to 0.4) and -1 (kept): exp((0.4 - 1) / 2). A < 0: log 2 (kept) and -1
    # (clipped to -0.3): exp((log 2 - 0.3) / 2).
    batch = inputs([2.0, exp(-1), 2.0, exp(-1)], [2, 2, -2, -2], lengths=[2, 2])
    loss, metrics = token_loss(batch, "gmpo", clip_low=0.3, clip_high=0.4)
    up, down = exp(-0.3), exp((log(2) - 0.3) / 2)
    close(loss, [-2 * up, -2 * up, 2 * down, 2 * down])
    assert metrics["actor/pg_clipfrac"].tolist() == [1, 0, 0, 1]
    close(gradient(batch, loss), [0, -2 * up, 2 * down, 0])


def test_reinforce_and_sft_by_hand() -> None:
    batch = inputs([0.5, 0.25], [2.0, -1.0])
    close(token_loss(batch, "reinforce")[0], [2 * log(2), -log(4)])
    close(token_loss(batch, "sft")[0], [log(2), log(4)])


def test_losses_without_an_old_log_prob_pass() -> None:
    assert {name for name in LOSSES.names() if not LOSSES[name].needs_old_log_probs} == {
        "reinforce", "sft", "dpo", "gkd",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "gspo", "gspo_token", "gmpo", "reinforce"]
)
def test_on_policy_every_gradient_is_the_policy_gradient(name: str) -> None:
    """At ratio 1, d loss / d log p is -A w for each token, with one advantage and one weight per sequence."""
    batch = random_inputs(6, [5, 8, 3])
    batch.old_log_probs = batch.log_probs.detach().clone()
    batch.advantages = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)[sequences_of(batch)]
    batch.loss_weights = batch.loss_mask * torch.tensor([0.2, 0.1, 0.3], dtype=torch.float64)[sequences_of(batch)]
    loss, _ = objective(batch, settings(loss=name))
    (grad,) = torch.autograd.grad(loss, batch.log_probs)
    torch.testing.assert_close(grad, -batch.advantages * batch.loss_weights)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "gmpo"])
def test_a_token_on_its_bound_is_not_clipped(name: str) -> None:
    """With clip bounds of 0, a ratio of 1 is at both bounds, and still has a gradient: the first update of a step learns."""
    batch = inputs([1.0, 1.0], [1.0, -2.0], lengths=[1, 1])
    loss, metrics = objective(batch, settings(loss=name, clip_low=0.0, clip_high=0.0))
    (grad,) = torch.autograd.grad(loss, batch.log_probs)
    close(grad, [-0.5, 1.0])
    assert metrics["actor/pg_clipfrac"] == 0.0


@pytest.mark.parametrize("name", ["ppo_clip", "sapo", "dppo_tv", "gspo", "gmpo", "reinforce"])
def test_a_nan_in_a_loss_token_makes_the_loss_nan(name: str) -> None:
    """Masking by arithmetic must not hide NaN in tokens that the loss counts."""
    batch = inputs([1.0, 1.0], [1.0, -2.0])
    assert batch.advantages is not None
    batch.advantages[1] = math.nan
    assert objective(batch, settings(loss=name))[0].isnan()


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'ppo_clip'"):
        LOSSES["ppoclip"]
