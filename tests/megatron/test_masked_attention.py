"""Attention with sliding windows and sinks equals transformers' gpt-oss, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megarl.megatron.native_layers.masked_attention import masked_attention, visible_keys

HEADS, GROUPS, SIZE = 4, 2, 8


def tensors(queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, HEADS, queries, SIZE), (2, GROUPS, keys, SIZE), (2, GROUPS, keys, SIZE), (HEADS,)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def of_transformers(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """transformers' attention, in which `hidden` [queries, keys] is true for keys that a query must not see."""
    module = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
    return eager_attention_forward(module, query, key, value, mask[None, None], scale)[0].transpose(1, 2)


@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (4, 11), (1, 7), (1, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 64])
def test_attention_and_gradients_equal_transformers(queries: int, keys: int, window: int | None) -> None:
    scale = 1.3 * SIZE**-0.5
    ours, theirs = tensors(queries, keys, torch.float64), tensors(queries, keys, torch.float64)
    hidden = torch.tensor(
        [
            [key > query or (window is not None and query - key >= window) for key in range(keys)]
            for query in range(keys - queries, keys)
        ]
    )
    out = masked_attention(*ours[:3], window=window, sinks=ours[3], scale=scale)
    expected = of_transformers(*theirs, hidden, scale)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for tensor, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("window", "with_sinks"), [(None, True), (4, True), (4, False)])
def test_torchs_memory_efficient_kernels_fit(
    monkeypatch: pytest.MonkeyPatch, window: int | None, with_sinks: bool
) -> None:
    """They need widths that are multiples of 8 for 16-bit types and, in torch 2.13, as many key heads as query heads."""
    calls: list[list[torch.Size]] = []
    kernel = F.scaled_dot_product_attention

    def wrapped(*inputs: torch.Tensor, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
        assert not enable_gqa
        calls.append([tensor.shape for tensor in inputs])
        return kernel(*inputs, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapped)
    query, key, value, sinks = (
        torch.randn(1, 4, 5, 64),
        torch.randn(1, 2, 5, 64),
        torch.randn(1, 2, 5, 64),
        torch.ones(4),
    )
    out = masked_attention(query, key, value, window=window, sinks=sinks if with_sinks else None)
    assert out.shape == query.shape
    assert len(calls) == 1 and all(shape[1] == 4 and shape[-1] % 8 == 0 for shape in calls[0])


def test_a_window_without_sinks_equals_the_softmax() -> None:
    query, key, value, _ = tensors(6, 9, torch.float64)
    out = masked_attention(query, key, value, window=3)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * SIZE**-0.5
    scores = scores.masked_fill(~visible_keys(6, 9, 3, False, scores.device), -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ value.repeat_interleave(2, 1), atol=1e-12, rtol=0)


def test_a_sink_is_not_rounded_in_bfloat16() -> None:
    """Queries of 0 leave the sinks as the only difference between heads: e^sink / (e^sink + keys) of the output is missing."""
    query, key, value, sinks = (tensor.detach() for tensor in tensors(3, 3, torch.bfloat16))
    query, value, sinks = (
        torch.zeros_like(query),
        torch.ones_like(value),
        torch.tensor([3.015625, -2.515625, 0.1, 7.03125]),
    )
    out = masked_attention(query, key, value, sinks=sinks.to(torch.bfloat16), scale=0.2266)
    counts = torch.arange(1.0, 4.0)
    expected = counts / (counts + sinks.to(torch.bfloat16).float().exp()[:, None])
    torch.testing.assert_close(out[0, :, :, 0].float(), expected, atol=0, rtol=5e-3)


def test_visible_keys_by_hand() -> None:
    device = torch.device("cpu")
    assert visible_keys(2, 4, 2, False, device).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible_keys(2, 3, None, True, device).int().tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]
