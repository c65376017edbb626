"""megarl's Adam: an update in parts equals the complete update and needs little extra memory."""

from __future__ import annotations

import pytest
import torch

from megarl.commands.plan.count.live_tensors import MemoryCounter
from megarl.megatron import adam

SHAPES = [(3000,), (70, 50), (1,), (257,), (0,)]


def trained(device: str, **settings: object) -> tuple[list[torch.Tensor], adam.Adam]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    params = [torch.nn.Parameter(param.detach().to(device)) for param in params]
    optimizer = adam.Adam(params, lr=0.1, weight_decay=0.1, **settings)
    return params, optimizer


def steps(optimizer: adam.Adam, params: list[torch.Tensor], count: int) -> None:
    for number in range(count):
        torch.manual_seed(number)
        for param in params:
            param.grad = torch.randn(param.shape).to(param.device)
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_update_in_parts_equals_the_whole_update(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, optimizer = trained("cpu", adam_w_mode=decoupled)
    steps(optimizer, whole, 3)
    parted, optimizer = trained("cpu", adam_w_mode=decoupled)
    monkeypatch.setattr(adam, "_AT_A_TIME", 1024)
    steps(optimizer, parted, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, parted, strict=True))


def test_an_update_equals_torchs_adam() -> None:
    ours, optimizer = trained("cpu")
    steps(optimizer, ours, 3)
    theirs, _ = trained("cpu")
    steps(torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1), theirs, 3)
    for updated, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(updated, other, rtol=1e-5, atol=1e-6)


def test_a_step_allocates_only_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "_AT_A_TIME", 1024)
    params, optimizer = trained("meta")
    steps(optimizer, params, 1)  # makes the moments
    with MemoryCounter(torch.device("meta")) as live:
        optimizer.step()
    assert 0 < live.peak <= 4 * 1024
