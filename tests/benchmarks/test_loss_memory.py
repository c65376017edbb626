"""The memory of losses, and the mode that counts it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.loss_memory import BOUND, SETTINGS, copies, peak_bytes, value_copies
from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.losses import rows
from megarl.algorithms.losses.rows import by_rows

TOKENS = 16_384


def test_live_bytes_count_saved_tensors_and_gradients_and_not_freed_tensors() -> None:
    vector = torch.rand(TOKENS, requires_grad=True)

    def passes(count: int) -> None:
        vector.grad = None
        for _ in range(count):
            vector.exp().sum().backward()  # exp() is kept for the backward pass

    assert peak_bytes(lambda: passes(1)) == pytest.approx(2 * vector.nbytes, rel=0.01), "exp() and the gradient"
    assert peak_bytes(lambda: passes(5)) == pytest.approx(3 * vector.nbytes, rel=0.01), (
        "and the gradient of earlier passes"
    )
    assert peak_bytes(lambda: vector.detach().view(2, -1)) == 0, "a view allocates nothing"


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_loss_needs_at_most_three_copies_of_its_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS", 256)
    assert copies(name, TOKENS) <= BOUND


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("name", ["ppo_clip", "gmpo", "clip_cov"])
def test_corrections_and_kl_stay_within_the_bound(name: str, case: str) -> None:
    assert copies(name, TOKENS, SETTINGS[case]) <= BOUND


def test_the_value_loss_needs_at_most_three_copies_of_its_inputs() -> None:
    assert value_copies(TOKENS) <= BOUND


@pytest.mark.parametrize("tokens", [1, 7, 8, 9])
def test_parts_give_the_loss_and_gradient_of_the_whole(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS", 4)
    variable, constant = torch.rand(2, tokens, 3, dtype=torch.float64)
    weights = torch.arange(1.0, tokens + 1, dtype=torch.float64)
    parts, whole = variable.clone().requires_grad_(), variable.clone().requires_grad_()
    losses = by_rows(parts, constant, lambda v, c: (v.exp() * (v - c)).sum(1))
    expected = (whole.exp() * (whole - constant)).sum(1)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(losses, expected)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-14, atol=0)


def test_rows_without_gradient_give_the_loss_alone() -> None:
    losses = by_rows(torch.ones(5, 2), torch.ones(5, 2), lambda v, c: (v * c).sum(1))
    assert losses.tolist() == [2.0] * 5
    assert not losses.requires_grad


def test_rows_of_two_dtypes_give_the_loss_of_the_wider_one() -> None:
    """A teacher's float32 log-probs keep the loss in float32; the gradient has the policy's dtype."""
    parts = torch.rand(5, 3).to(torch.bfloat16).requires_grad_()
    losses = by_rows(parts, torch.rand(5, 3), lambda v, c: (v.exp() * (v - c)).sum(1))
    losses.sum().backward()
    assert losses.dtype == torch.float32 and parts.grad is not None and parts.grad.dtype == torch.bfloat16
