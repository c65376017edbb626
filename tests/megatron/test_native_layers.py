"""Fused kernels of the native layers: results equal to the fallbacks', and the choice of kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType

from megarl.megatron import host_offsets
from megarl.megatron.model.gated_delta_net import _l2_normalized
from megarl.megatron.native_layers import attention as native_attention
from megarl.megatron.native_layers import experts as native_experts
from megarl.megatron.native_layers import fused_kernels
from megarl.megatron.native_layers.attention import NativeAttention, plan_chunks, sequence_order
from megarl.megatron.native_layers.experts import ColumnParallelGroupedLinear, expert_linears, expert_rows, stacked
from megarl.megatron.native_layers.fused_kernels import Kernel, description, grouped_gemm, packed_attention
from megarl.trainer.worker import kernel_notices

CPU = torch.device("cpu")
NONE = Kernel(None, "", "switched off")


# --- experts -------------------------------------------------------------------------------------------------------


def product(counts: list[int], shape: tuple[int, int], dtype: torch.dtype, *, side_by_side: bool) -> list[torch.Tensor]:
    """Return the output and the gradients of the input and of each expert's weight [out, in] = `shape`."""
    torch.manual_seed(0)
    block = torch.randn(len(counts), *shape).to(dtype)
    parts = list(block) if side_by_side else [weight.clone() for weight in block]
    weights = [torch.nn.Parameter(part) for part in parts]
    x = torch.randn(sum(counts), shape[1]).to(dtype).requires_grad_()
    out = expert_linears(x, counts, weights)
    out.backward(torch.randn(out.shape).to(dtype))
    return [out.detach(), x.grad, *(weight.grad for weight in weights)]  # type: ignore[list-item]


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product for CPUs")
@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 8], [4, 4, 4, 4], [0, 0, 1, 0], [0, 0, 0, 0]])
def test_a_grouped_product_equals_one_product_per_expert(
    counts: list[int], dtype: torch.dtype, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    kernel = grouped_gemm(CPU, dtype)
    assert kernel.function is not None, kernel.reason

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        called.append(args)
        assert kernel.function is not None
        return kernel.function(*args, **kwargs)

    monkeypatch.setattr(native_experts, "grouped_gemm", lambda *_: Kernel(counting, "counting"))
    grouped = product(counts, (24, 16), dtype, side_by_side=side_by_side)
    assert len(called) == (3 if sum(counts) else 0)
    monkeypatch.setattr(native_experts, "grouped_gemm", lambda *_: NONE)
    for actual, other in zip(grouped, product(counts, (24, 16), dtype, side_by_side=side_by_side), strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 10), (10, 16)])
def test_sizes_that_a_grouped_product_refuses_use_one_product_per_expert(
    shape: tuple[int, int], monkeypatch: Any
) -> None:
    """Rows of 10 numbers do not begin at multiples of 16 bytes."""
    got = product([3, 5], shape, torch.float32, side_by_side=True)
    monkeypatch.setattr(native_experts, "grouped_gemm", lambda *_: NONE)
    for actual, other in zip(got, product([3, 5], shape, torch.float32, side_by_side=True), strict=True):
        assert torch.equal(actual, other)


def test_a_type_without_a_grouped_product_uses_one_product_per_expert() -> None:
    assert "Double" in grouped_gemm(CPU, torch.float64).reason
    assert product([3, 5], (24, 16), torch.float64, side_by_side=True)[0].dtype == torch.float64


def test_each_token_gets_the_row_of_its_expert() -> None:
    rows = [torch.tensor([float(expert), -1.0], requires_grad=True) for expert in range(3)]
    out = expert_rows(rows, [2, 0, 1])
    assert out.tolist() == [[0.0, -1.0], [0.0, -1.0], [2.0, -1.0]]
    out.sum().backward()
    assert [row.grad.tolist() for row in rows] == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]  # type: ignore[union-attr]
    assert expert_rows([row.detach().to("meta") for row in rows], [2, 0, 1]).shape == (3, 2)


@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_biases_of_experts_are_added_or_returned(skip_bias_add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    monkeypatch.setattr(native_experts, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=lambda _: nullcontext()))
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1))
    config = SimpleNamespace(params_dtype=torch.float32, expert_model_parallel_size=1)
    linear = ColumnParallelGroupedLinear(
        2, 4, 6, config=config, init_method=torch.nn.init.normal_, pg_collection=groups, bias=True,
        skip_bias_add=skip_bias_add,
    )  # fmt: skip
    names = {name for name, _ in linear.named_parameters()}
    assert names == {"weight0", "weight1", "bias0", "bias1"} and linear.bias1.allreduce
    with torch.no_grad():
        linear.bias0.fill_(1.0)
        linear.bias1.fill_(2.0)
    x = torch.randn(5, 4)
    out, biases = linear(x, [2, 3])
    plain = torch.cat([x[:2] @ linear.weight0.t(), x[2:] @ linear.weight1.t()])
    added = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0])[:, None]
    torch.testing.assert_close(out, plain if skip_bias_add else plain + added)
    assert (biases == [linear.bias0, linear.bias1]) if skip_bias_add else biases is None


def test_a_product_of_meta_tensors_has_the_real_shapes() -> None:
    real, planned = ([], [])  # type: ignore[var-annotated]
    for device, shapes in ((CPU, real), (torch.device("meta"), planned)):
        x = torch.randn(8, 16, device=device, requires_grad=True)
        weights = [torch.nn.Parameter(torch.randn(24, 16, device=device)) for _ in range(2)]
        out = expert_linears(x, [3, 5], weights)
        shapes += [tensor.shape for tensor in (out, *torch.autograd.grad(out, [x, *weights], torch.empty_like(out)))]
    assert real == planned


def test_contiguous_weights_are_not_copied() -> None:
    block = torch.randn(4, 3, 2)
    assert stacked(list(block)).data_ptr() == block.data_ptr()
    assert torch.equal(stacked(list(block)), block)
    for weights in (
        list(block.flip(0)),
        list(block[::2]),
        [weight.clone() for weight in block],
        [weight.t() for weight in block],
    ):
        assert torch.equal(stacked(weights), torch.stack(weights))


# --- attention -----------------------------------------------------------------------------------------------------


def reference_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    query_offsets: torch.Tensor, key_offsets: torch.Tensor, longest_query: int, longest_key: int,
    *, causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Flash attention over packed sequences in plain torch: the last query sees the last key."""
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "kernels know one width"
    queries, keys = query_offsets.tolist(), key_offsets.tolist()
    assert longest_query == max(b - a for a, b in pairwise(queries))
    assert longest_key == max(b - a for a, b in pairwise(keys))
    out = []
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        if causal:
            hidden = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a)).logical_not()
            scores = scores.masked_fill(hidden, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


class Ranks:
    def __init__(self, number: int) -> None:
        self.number = number

    def rank(self) -> int:
        return self.number


def attention(
    mask: AttnMaskType, ranks: int = 1, rank: int = 0, scale: float | None = None, window: int | None = None
) -> NativeAttention:
    config = SimpleNamespace(
        attention_dropout=0.0,
        context_parallel_size=ranks,
        softmax_type="vanilla",
        window_size=window and (window - 1, 0),
        window_attn_skip_freq=None,
    )
    groups = SimpleNamespace(cp=Ranks(rank))
    return NativeAttention(config, 1, mask, "self", softmax_scale=scale, pg_collection=groups)


def with_sinks(layer: NativeAttention) -> NativeAttention:
    layer.softmax_offset, layer.masked = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0])), True
    return layer


def packed(lengths: list[int]) -> Any:
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    return SimpleNamespace(cu_seqlens_q=offsets, cu_seqlens_q_padded=None)


def inputs(tokens: int, value: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = [(tokens, 4, 16), (tokens, 2, 16), (tokens, 2, value)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def with_gradients(compute: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    out = compute(*tensors)
    torch.manual_seed(2)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.randn(out.shape))]


@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("value", [16, 12])
def test_a_kernel_for_packed_sequences_equals_padded_rectangles(
    mask: AttnMaskType, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [5, 1, 9, 3]
    layer, params = attention(mask, scale=0.3), packed(lengths)

    def compute(*tensors: torch.Tensor) -> torch.Tensor:
        return layer(*tensors, packed_seq_params=params)

    padded = with_gradients(compute, inputs(sum(lengths), value))
    monkeypatch.setattr(native_attention, "packed_attention", lambda *_: Kernel(reference_kernel, "reference"))
    monkeypatch.setattr(native_attention, "plan_padding", None)  # nothing is padded
    for actual, other in zip(with_gradients(compute, inputs(sum(lengths), value)), padded, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-4, atol=1e-5)


def test_dropout_disables_a_kernel_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_attention, "packed_attention", lambda *_: Kernel(reference_kernel, "reference"))
    layer = attention(AttnMaskType.causal)
    query = torch.empty(0)
    assert layer._packed_kernel(query) is reference_kernel
    layer.dropout = 0.1
    assert layer._packed_kernel(query) is None
    assert layer.eval()._packed_kernel(query) is reference_kernel


@pytest.mark.parametrize("window", [None, 3])
def test_windows_and_sinks_of_packed_sequences_end_with_the_sequence(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed sequences give the results of the single sequences. The kernel without windows and sinks is not called."""
    monkeypatch.setattr(native_attention, "packed_attention", lambda *_: Kernel(reference_kernel, "reference"))
    lengths = [5, 1, 9, 3]
    layer = with_sinks(attention(AttnMaskType.causal, window=window))
    query, key, value = inputs(sum(lengths))
    got = layer(query, key, value, packed_seq_params=packed(lengths)).split(lengths)
    for of_sequence, *tensors in zip(got, *(x.split(lengths) for x in (query, key, value)), strict=True):
        alone = layer(*(x.unsqueeze(1) for x in tensors))
        torch.testing.assert_close(of_sequence, alone.squeeze(1), rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError, match="no family has"):
        attention(AttnMaskType.no_mask, window=3)


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("ranks", [2, 3])
def test_chunks_of_a_sequence_attend_to_earlier_chunks(
    ranks: int, by_kernel: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window has sinks, too."""

    def layer_of(*place: int) -> NativeAttention:
        layer = attention(AttnMaskType.causal, *place, window=window)
        return with_sinks(layer) if window else layer

    lengths = [4 * ranks, 2 * ranks, 6 * ranks]
    query, key, value = inputs(sum(lengths), value=12)
    whole = layer_of()._packed(query, key, value, tuple(lengths))
    if by_kernel:
        monkeypatch.setattr(native_attention, "packed_attention", lambda *_: Kernel(reference_kernel, "reference"))
    places, start = [], 0
    for length in lengths:  # as batch.py's _share
        chunk = length // (2 * ranks)
        places.append(
            [[start + n * chunk + i for n in (r, 2 * ranks - 1 - r) for i in range(chunk)] for r in range(ranks)]
        )
        start += length
    of_rank = [torch.tensor([token for sequence in places for token in sequence[rank]]) for rank in range(ranks)]
    order = torch.cat(of_rank)
    shares = tuple(length // ranks for length in lengths)
    in_order, back = sequence_order(shares, ranks, CPU)
    assert torch.equal(order[in_order], torch.arange(len(order))) and torch.equal(
        in_order[back], torch.arange(len(order))
    )
    for rank in range(ranks):
        got = layer_of(ranks, rank)._packed_over_ranks(query[of_rank[rank]], key[order], value[order], shares)
        torch.testing.assert_close(got, whole[of_rank[rank]], rtol=1e-4, atol=1e-5)
        plan = plan_chunks(shares, ranks, rank, CPU)
        seen = sum(sum(chunk.key_lengths) for chunk in plan.chunks)
        assert seen == sum(lengths) * (2 * ranks + 1) // (2 * ranks), "no key is read that no query of the chunk sees"


def test_queries_and_keys_of_delta_nets_are_rounded_once() -> None:
    """Engines round once; a second rounding changes a fifth of the elements."""
    torch.manual_seed(0)
    x = torch.randn(64, 128).bfloat16()
    exact = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(_l2_normalized(x), exact.bfloat16())


# --- choice --------------------------------------------------------------------------------------------------------


def test_the_description_names_the_kernels_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "padded rectangles (no kernel for cpu)" in description(CPU, torch.float32, experts=False)
    assert "experts one by one (torch.nn.functional.grouped_mm: " in description(CPU, torch.float64, experts=True)
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    grouped_gemm.cache_clear()
    try:
        assert f"torch {torch.__version__} has no grouped_mm" in grouped_gemm(CPU, torch.float32).reason
    finally:
        grouped_gemm.cache_clear()


def test_a_device_without_kernels_names_the_reason_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt runs on a CPU, which has neither kernel."""
    monkeypatch.setattr(fused_kernels, "_try_attention", lambda function, _, dtype: _attempt(function, dtype))
    fused_kernels._packed_attention.cache_clear()
    try:
        reason = packed_attention(torch.device("cuda"), torch.float32).reason
    finally:
        fused_kernels._packed_attention.cache_clear()
    assert "torch.nn.attention.varlen: " in reason and "flash_attn: not installed" in reason


def _attempt(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    tokens = torch.ones(4, 2, 64, dtype=dtype)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    function(tokens, tokens, tokens, offsets, offsets, 4, 4, causal=True, scale=None)


# --- offsets -------------------------------------------------------------------------------------------------------


def test_offsets_of_a_batch_are_not_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    registered, other = (torch.tensor([0, 3, 7], dtype=torch.int32) for _ in range(2))
    host_offsets.remember(registered, [0, 3, 7])
    reads: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or tolist(self))
    assert host_offsets.host_offsets(registered) == (0, 3, 7) and not reads
    assert [host_offsets.host_offsets(other) for _ in range(2)] == [(0, 3, 7)] * 2
    assert len(reads) == 1


def test_ranks_with_different_kernels_are_named() -> None:
    """Each rank tries the kernels separately, and the attempt may fail on one of them."""
    fused, plain = "attention by flash_attn", "attention by padded rectangles (out of memory)"
    assert kernel_notices([{"kernels": fused}] * 3) == []
    (notice,) = kernel_notices([{"kernels": text} for text in (fused, plain, fused, plain)])
    assert "[1, 3]" in notice and plain in notice and fused in notice
