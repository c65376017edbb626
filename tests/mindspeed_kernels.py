"""CPU implementations of the Ascend kernels that MindSpeed calls in a training step.

Each has the arguments of its kernel in torch_npu or MindSpeed, and asserts what the kernel demands of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Put the implementations in the kernels' places. After MindSpeed has been imported."""
    import torch_npu
    from mindspeed.ops import npu_apply_fused_adamw_v2 as fused

    for function in (npu_fusion_attention, npu_rms_norm, npu_swiglu, npu_grouped_matmul):
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
    assert actual_seq_qlen[-1] == len(query) and actual_seq_kvlen[-1] == len(key)
    if sparse_mode == 2:
        assert atten_mask is not None and atten_mask.shape == (2048, 2048), "modes 2 to 4 take the compressed mask"
    else:
        assert sparse_mode == 0 and atten_mask is None, sparse_mode
    parts, q_begin, kv_begin = [], 0, 0
    for q_end, kv_end in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
        q, k, v = query[q_begin:q_end], key[kv_begin:kv_end], value[kv_begin:kv_end]
        parts.append(_attention(q, k, v, scale, causal=sparse_mode == 2))
        q_begin, kv_begin = q_end, kv_end
    return (torch.cat(parts),)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention of one sequence; causal masks align at the top left."""
    share = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(share, 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


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
    """Products of groups of tokens with their own weights: `group_type` 0 splits rows, 2 splits the inner dimension.
    `group_list` has ends of groups (type 0) or their sizes (type 1)."""
    assert group_list is not None and not bias and len(x) == 1
    sizes = group_list.tolist()
    if group_list_type == 0:
        sizes = [end - begin for begin, end in zip([0, *sizes[:-1]], sizes, strict=True)]
    if group_type == 0:
        weights = list(weight[0]) if len(weight) == 1 else weight
        return [torch.cat([part @ own for part, own in zip(x[0].split(sizes), weights, strict=True)])]
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
