"""CPU implementations of the Ascend kernels that MindSpeed calls in a training step.

Each has the arguments of its kernel in torch_npu or MindSpeed, and asserts the kernel's requirements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Replace the kernels by the implementations. Call after MindSpeed has been imported."""
    import torch_npu
    from mindspeed.ops import npu_apply_fused_adamw_v2 as fused

    for function in (npu_fusion_attention, npu_fusion_attention_grad, npu_rms_norm, npu_swiglu, npu_grouped_matmul):
        setattr(torch_npu, function.__name__, function)
    fused.op_builder.load = lambda: fused_adamw


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Attention of packed sequences, [tokens, heads, width] (layout TND); a leading 0 in `actual_seq_qlen` is empty."""
    assert input_layout == "TND", input_layout
    assert pse is padding_mask is prefix is None and keep_prob == 1.0
    assert query.shape[1] == head_num
    assert actual_seq_qlen is not None and actual_seq_kvlen is not None
    causal = _is_causal(sparse_mode, atten_mask)
    outs, maxima, sums = [], [], []
    for q, k, v in _sequences(actual_seq_qlen, actual_seq_kvlen, query, key, value):
        out, maximum, total = _attention(q, k, v, scale, causal)
        outs.append(out)
        maxima.append(maximum)
        sums.append(total)
    none = query.new_empty(0)
    return torch.cat(outs), _statistics(maxima, head_num), _statistics(sums, head_num), none, 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, from softmax statistics that may cover more keys."""
    assert input_layout == "TND" and pse is padding_mask is softmax_in is prefix is None and keep_prob == 1.0
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    assert actual_seq_qlen is not None and actual_seq_kvlen is not None
    causal = _is_causal(sparse_mode, atten_mask)
    grads: tuple[list[Tensor], ...] = ([], [], [])
    begin = 0
    rows = _sequences(actual_seq_qlen, actual_seq_kvlen, query, key, value, dy, attention_in)
    for q, k, v, grad_out, out in rows:
        end = begin + head_num * len(q)
        maximum, total = (x.reshape(-1, 8)[begin:end, :1].view(head_num, -1, 1) for x in (softmax_max, softmax_sum))
        begin = end
        share = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(share, 1).transpose(0, 1) for x in (k, v))
        queries, grad, result = (x.transpose(0, 1) for x in (q, grad_out, out))
        weights = ((_masked(queries @ keys.transpose(1, 2) * scale_value, causal)) - maximum).exp() / total
        inner = weights * (grad @ values.transpose(1, 2) - (grad * result).sum(-1, keepdim=True)) * scale_value
        parts = (inner @ keys, inner.transpose(1, 2) @ queries, weights.transpose(1, 2) @ grad)
        for place, (grouped, part) in enumerate(zip((1, share, share), parts, strict=True)):
            by_head = part.transpose(0, 1)
            grads[place].append(by_head.unflatten(1, (-1, grouped)).sum(2))
    return (*(torch.cat(parts) for parts in grads), query.new_empty(0))


def _is_causal(sparse_mode: int, atten_mask: Tensor | None) -> bool:
    if sparse_mode in (2, 3):  # they differ where queries and keys are not equally many
        assert atten_mask is not None and atten_mask.shape == (2048, 2048), "modes 2 to 4 take the compressed mask"
        return True
    assert sparse_mode == 0 and atten_mask is None, sparse_mode
    return False


def _sequences(
    q_ends: Sequence[int], kv_ends: Sequence[int], query: Tensor, *tensors: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield each sequence's rows of `query` and `tensors`; the first two of `tensors` have one row per key."""
    assert q_ends[-1] == len(query) and kv_ends[-1] == len(tensors[0]), (q_ends, kv_ends, len(query), len(tensors[0]))
    q_begin, kv_begin = 0, 0
    for q_end, kv_end in zip(q_ends, kv_ends, strict=True):
        yield (
            query[q_begin:q_end],
            *(other[kv_begin:kv_end] for other in tensors[:2]),
            *(other[q_begin:q_end] for other in tensors[2:]),
        )
        q_begin, kv_begin = q_end, kv_end


def _masked(scores: Tensor, causal: bool) -> Tensor:
    if not causal:
        return scores
    assert scores.shape[-1] == scores.shape[-2], "which end causal masks align at would matter"
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(output [tokens, heads, width], maxima and sums [heads, tokens] of the softmax) of one sequence."""
    share = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(share, 0) for x in (k, v))
    scores = _masked((q @ k.transpose(1, 2)) * scale, causal)
    maximum = scores.detach().amax(-1) if scores.numel() else scores.new_empty(scores.shape[:2])
    total = (scores.detach() - maximum[..., None]).exp().sum(-1)
    return (scores.softmax(-1) @ v).transpose(0, 1), maximum, total


def _statistics(parts: list[Tensor], head_num: int) -> Tensor:
    """Softmax statistics as the kernel writes them in layout TND: [heads, tokens] of each sequence in turn, repeated eight
    times, viewed as [all tokens, heads, 8]."""
    return torch.cat([part.reshape(-1) for part in parts])[:, None].repeat(1, 8).view(-1, head_num, 8)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    inverse = torch.rsqrt(self.float().square().mean(-1, keepdim=True) + epsilon)
    return (self.float() * inverse).to(self.dtype) * gamma, inverse


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = self.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
) -> list[Tensor]:
    """Product of each group of tokens with its weight: `group_type` 0 splits rows, 2 splits the inner dimension.
    `group_list` has ends of groups (type 0) or their sizes (type 1)."""
    assert group_list is not None and not bias and len(x) == 1
    sizes = group_list.tolist()
    if group_list_type == 0:
        sizes = [end - begin for begin, end in zip([0, *sizes[:-1]], sizes, strict=True)]
    if group_type == 0:
        weights = list(weight[0]) if len(weight) == 1 else weight
        return [torch.cat([part @ weight for part, weight in zip(x[0].split(sizes), weights, strict=True)])]
    assert group_type == 2, group_type
    pairs = zip(x[0].split(sizes, 1), weight[0].split(sizes, 0), strict=True)
    return [torch.stack([left @ right for left, right in pairs])]


class fused_adamw:
    @staticmethod
    def npu_apply_fused_adamw_v2(
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor,
        state_step: Tensor,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
    ) -> None:
        """One AdamW update of `param` and its moments, in place."""
        assert isinstance(state_step, Tensor) and state_step.dtype == torch.int64 and state_step.dim() == 0
        assert all(tensor.untyped_storage().size() for tensor in (param, grad, exp_avg, exp_avg_sq)), "swapped out"
        step = state_step.float()
        torch._fused_adamw_(
            [param],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [max_exp_avg_sq] if amsgrad else [],
            [step],
            amsgrad=amsgrad,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )
