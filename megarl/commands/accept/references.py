"""References of single layers, in float64 on the CPU, written from the published definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention of packed sequences: query [T, heads, d], key and value [T, groups, ...] -> [T, heads * dv]."""
    heads, groups = query.shape[1], key.shape[1]
    key, value = (tensor.repeat_interleave(heads // groups, 1) for tensor in (key, value))
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    parts = []
    for start, end in pairwise(offsets):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        scores = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        parts.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(parts)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)); weights [out, in]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def experts(
    x: Tensor, counts: Sequence[int], probabilities: Tensor, weights: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """Rows sorted by expert, `counts` of each expert -> each row's `gated` times its probability [T]."""
    parts = torch.split(x, list(counts))
    outputs = [gated(part, *expert) for part, expert in zip(parts, weights, strict=True)]
    return torch.cat(outputs) * probabilities[:, None]


def rotate(x: Tensor, lengths: Sequence[int], base: float) -> Tensor:
    """Rotary embedding (Su et al. 2021) of packed sequences, x [T, heads, d], the two halves of d as pairs."""
    half = x.shape[-1] // 2
    positions = torch.cat([torch.arange(length, dtype=torch.float64) for length in lengths])
    angles = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def adam(weight: Tensor, gradients: Sequence[Tensor], rate: float, betas: tuple[float, float], eps: float) -> Tensor:
    """AdamW (Loshchilov and Hutter 2019) without decay, one step per gradient."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient.square()
        unbiased = (square / (1 - betas[1] ** step)).sqrt()
        weight = weight - rate * (mean / (1 - betas[0] ** step)) / (unbiased + eps)
    return weight
