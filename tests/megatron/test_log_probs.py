"""Log-probs, entropy and squared probabilities from hidden states and the output layer, against the softmax and autograd."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megarl.megatron.heads.log_probs import log_probs_and_entropy, log_probs_and_squares


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of two rows."""
    monkeypatch.setattr("megarl.megatron.heads.log_probs._BLOCK_ELEMENTS_CPU", 22)
    monkeypatch.setattr("megarl.megatron.heads.log_probs._LEAST_ROWS", 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("blocked", [False, True])
def test_log_probs_and_entropy_equal_the_softmax(
    temperature: float, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocked:
        small_blocks(monkeypatch)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = (torch.randn(11, 3, dtype=torch.float64) * 3).requires_grad_()
    labels = torch.tensor([[0, 1, 0], [8, 3, 4], [3, 8, 2], [3, 3, 3], [1, 0, 8]])  # a row's may repeat

    def ours(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        settings = {"temperature": temperature, "vocab_size": 9, "with_entropy": True}
        return log_probs_and_entropy(x, w, labels, **settings, keep_logits=False, group=None)

    naive = ((hidden @ weight.T)[:, :9] / temperature).log_softmax(-1)  # entries 9 and 10 are padding
    log_probs, entropy = ours(hidden, weight)
    torch.testing.assert_close(log_probs, naive.gather(1, labels))
    torch.testing.assert_close(entropy, -(naive.exp() * naive).sum(-1))
    assert torch.autograd.gradcheck(ours, (hidden, weight))
    (log_probs.sum(1) * entropy).sum().backward()
    assert torch.equal(weight.grad[9:], torch.zeros(2, 3, dtype=torch.float64))


def test_log_probs_without_entropy_have_the_same_gradient() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    settings = {"temperature": 2.0, "vocab_size": 6, "with_entropy": False, "keep_logits": False, "group": None}

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return log_probs_and_entropy(x, w, torch.tensor([[5], [0], [2], [2]]), **settings)[0]

    assert torch.autograd.gradcheck(ours, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_do_not_change_values_or_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    torch.manual_seed(0)
    start = torch.randn(7, 5).to(dtype), torch.randn(11, 5).to(dtype)
    labels, slopes = torch.randint(0, 11, (7, 1)), torch.randn(2, 7)
    results = []
    for keep_logits in (False, True):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in start)
        settings = {"temperature": 0.7, "vocab_size": 11, "with_entropy": True, "keep_logits": keep_logits}
        log_probs, entropy = log_probs_and_entropy(hidden, weight, labels, **settings, group=None)
        assert len(log_probs.grad_fn.kept) == (4 if keep_logits else 0)
        (log_probs[:, 0] * slopes[0] + entropy * slopes[1]).sum().backward()
        results.append((log_probs, entropy, hidden.grad, weight.grad))
    for recomputed, kept in zip(*results, strict=True):
        assert torch.equal(recomputed, kept)


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("blocked", [False, True])
def test_an_output_layer_in_float32_has_exact_logits(
    keep_logits: bool, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the softmax of float64 products of the same bfloat16 numbers: values and gradients before their rounding."""
    if blocked:
        small_blocks(monkeypatch)
    torch.manual_seed(0)
    start = (torch.randn(7, 64) * 1.5).bfloat16(), torch.randn(11, 64).bfloat16()
    labels, slopes = torch.randint(0, 9, (7, 2)), torch.randn(7, dtype=torch.float64)

    def results(fp32: bool) -> tuple[torch.Tensor, ...]:
        hidden, weight = (tensor.clone().requires_grad_() for tensor in start)
        settings = {"temperature": 0.7, "vocab_size": 9, "with_entropy": True, "keep_logits": keep_logits}
        log_probs, entropy = log_probs_and_entropy(hidden, weight, labels, **settings, group=None, fp32=fp32)
        assert entropy is not None and log_probs.dtype == entropy.dtype == torch.float32
        ((log_probs.sum(1) + entropy) * slopes.float()).sum().backward()
        assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
        return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad

    hidden, weight = (tensor.double().requires_grad_() for tensor in start)
    expected = ((hidden @ weight.T)[:, :9] / 0.7).log_softmax(-1)
    chosen, entropy = expected.gather(1, labels), -(expected.exp() * expected).sum(-1)
    ((chosen.sum(1) + entropy) * slopes).sum().backward()
    log_probs, entropies, grad_hidden, grad_weight = results(fp32=True)
    torch.testing.assert_close(log_probs.double(), chosen.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropies.double(), entropy.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad_hidden.double(), hidden.grad, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(grad_weight.double(), weight.grad, rtol=2**-8, atol=1e-4)
    assert (results(fp32=False)[0].double() - chosen).abs().max() > 0.02, "bfloat16 rounds the logits"


class Ranks:
    """Stand-in for torch.distributed: threads are ranks, and a reduction waits for all of them."""

    def __init__(self, count: int) -> None:
        self.barrier, self.tensors = threading.Barrier(count), [torch.empty(0)] * count
        self.rank = threading.local()

    def get_rank(self, _: object) -> int:
        return int(self.rank.value)

    def all_reduce(self, tensor: torch.Tensor, op: object = None, group: object = None) -> None:
        self.tensors[self.get_rank(group)] = tensor.clone()
        self.barrier.wait()
        every = torch.stack(self.tensors)
        self.barrier.wait()
        tensor.copy_(every.amax(0) if op is torch.distributed.ReduceOp.MAX else every.sum(0))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_squared_probabilities_over_a_split_vocabulary(
    ranks: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of few rows, logits that overflow without the maximum, padding at the end of the last shards."""
    small_blocks(monkeypatch)
    torch.manual_seed(1)
    hidden, weight = torch.randn(5, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64) * 300
    labels = torch.tensor([[0], [8], [3], [5], [1]])
    naive = ((hidden @ weight.T)[:, :9] / temperature).log_softmax(-1)
    distributed = Ranks(ranks)
    monkeypatch.setattr("megarl.megatron.heads.log_probs.dist.get_rank", distributed.get_rank)
    monkeypatch.setattr("megarl.megatron.heads.log_probs.dist.all_reduce", distributed.all_reduce)

    def compute(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        distributed.rank.value = rank
        shard = weight.chunk(ranks)[rank].clone().requires_grad_()
        group: Any = distributed if ranks > 1 else None
        return log_probs_and_squares(hidden, shard, labels, temperature=temperature, vocab_size=9, group=group)

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(compute, range(ranks)))
    for log_probs, squares in results:
        torch.testing.assert_close(log_probs, naive.gather(1, labels))
        torch.testing.assert_close(squares, naive.exp().square().sum(-1))
        assert not log_probs.requires_grad and not squares.requires_grad
