"""RMSNorm and rotary embedding as single autograd nodes with hand-written gradients.

Composed of torch operations, each would read and write its tensors several times in forward and backward, which
dominates the time of a small model on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.megatron.host_offsets import host_offsets


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension. For 16-bit types and on devices, torch's fused kernel.

    zero_centered: the factor is 1 + weight, which is added in float32 for 16-bit types, as engines do.
    """
    wide = x.dtype in (torch.float32, torch.float64)
    if zero_centered and not wide:
        return _ZeroCenteredRMSNorm.apply(x, weight, eps)
    factor = weight + 1 if zero_centered else weight
    if x.device.type != "cpu" or not wide:
        return F.rms_norm(x, factor.shape, factor, eps)
    return _RMSNorm.apply(x, factor, eps)


class _ZeroCenteredRMSNorm(torch.autograd.Function):
    """RMSNorm of a 16-bit input, in float32. Backward repeats forward, so that no float32 copy of the input is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1, eps).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            inputs = x.float().requires_grad_(), (weight.float() + 1).requires_grad_()
            out = F.rms_norm(inputs[0], weight.shape, inputs[1], ctx.eps)
        grad_x, grad_weight = torch.autograd.grad(out, inputs, grad.float())
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        products = (grad * normed).reshape(-1, weight.numel())
        grad_weight = torch.mv(products.t(), products.new_ones(len(products)))  # faster than sum(0) over many rows
        grad_normed = grad * weight
        along = torch.linalg.vecdot(grad_normed, normed).div_(x.shape[-1]).unsqueeze(-1)
        return grad_normed.addcmul_(normed, along, value=-1).mul_(scale), grad_weight, None


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Rotary embedding of packed sequences: t [tokens, heads, d], freqs [positions, 1, 1, rotated <= d].

    Same arguments as Megatron's function, which slices `freqs` sequence by sequence.
    """
    ranks, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    rows = _positions(host_offsets(cu_seqlens), ranks, rank, t.device)
    half = freqs.shape[-1] // 2
    # Each angle twice: in both halves, or in both elements of a pair.
    angles = freqs[:, 0, :, ::2] if rotary_interleaved else freqs[:, 0, :, :half]
    cos = (angles.cos() * mscale).to(t.dtype).index_select(0, rows)
    sin = (angles.sin() * mscale).to(t.dtype).index_select(0, rows)
    rotated, rest = t.split([2 * half, t.shape[-1] - 2 * half], -1)
    if multi_latent_attention or rotary_interleaved:  # these models' weights store the pairs interleaved
        rotated = rotated.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
    rotated = _Rotate.apply(rotated, cos, sin)
    if rotary_interleaved:
        rotated = rotated.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


@lru_cache(maxsize=64)
def _positions(cu_seqlens: tuple[int, ...], ranks: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return each token's position within its sequence on context-parallel `rank` of `ranks`, int64 [local tokens]."""
    offsets = torch.tensor(cu_seqlens)
    lengths = offsets.diff()
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    if ranks > 1:
        chunk = (lengths // (2 * ranks)).repeat_interleave(lengths)
        number = within // chunk
        within = within[(number == rank) | (number == 2 * ranks - 1 - rank)]
    return within.to(device)


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of the last dimension."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(t, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    a, b = t.chunk(2, -1)
    result = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    first, second = result.chunk(2, -1)
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin, value=direction)
    return result
