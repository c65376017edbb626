"""Causal attention with a sliding window and attention sinks, on torch's kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

_FURTHER = 8  # elements of a query besides the head's own: two for the sink, the rest zeros


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal attention of query [b, heads, s, d] to key and value [b, key heads, t, d], s <= t.

    Queries are the last s positions of the keys. `window`: number of keys that a query sees, itself included; None: all
    before it. `sinks` [heads]: logits that only the softmax's denominator has. `scale`: of the other logits; None: d^-0.5.

    A sink is computed as a further key with value 0. Two further elements of each query, which are 0 in the other keys, give
    this key the logit of the query's head: two, so that 16-bit types do not round it.

    With a mask, torch's only CUDA kernels that do not materialize the logits are the memory-efficient ones. They need widths
    that are multiples of 8 for 16-bit types and, in torch 2.13, as many key heads as query heads.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (_for_each_head(tensor, query.shape[1]) for tensor in (key, value))
    mask = visible_keys(query.shape[2], key.shape[2], window, sinks is not None, query.device)
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    exact = torch.promote_types(query.dtype, torch.float32)
    logits = (sinks.to(exact) / scale).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    rounded = logits.to(query.dtype)
    rest = (logits - rounded).detach().to(query.dtype)
    query = F.pad(torch.cat([query, rounded, rest], -1), (0, _FURTHER - 2))
    key, value = (F.pad(tensor, (0, _FURTHER, 0, 1)) for tensor in (key, value))
    key[:, :, -1, -_FURTHER : 2 - _FURTHER] = 1.0
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out[..., :-_FURTHER]


def _for_each_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each head of a key or value [b, key heads, t, d] for its group of query heads: [b, heads, t, d]."""
    groups = tensor.shape[1]
    if groups == heads:
        return tensor
    return tensor.unsqueeze(2).expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)


@lru_cache(maxsize=2)  # of a micro batch, with and without a window: a mask of 32,768 tokens takes 1 GiB
def visible_keys(queries: int, keys: int, window: int | None, with_sink: bool, device: torch.device) -> torch.Tensor:
    """Return the mask [queries, keys] that is true where a query sees a key; `with_sink`: all see one more key, the last."""
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return F.pad(visible, (0, 1), value=True) if with_sink else visible
