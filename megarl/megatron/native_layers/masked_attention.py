"""Causal attention with a sliding window and attention sinks, on torch's kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


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
    """
    grouped, scale = query.shape[1] != key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    mask = visible_keys(query.shape[2], key.shape[2], window, sinks is not None, query.device)
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    exact = torch.promote_types(query.dtype, torch.float32)
    logits = (sinks.to(exact) / scale).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    rounded = logits.to(query.dtype)
    rest = (logits - rounded).detach().to(query.dtype)
    query, key, value = torch.cat([query, rounded, rest], -1), F.pad(key, (0, 2, 0, 1)), F.pad(value, (0, 2, 0, 1))
    key[:, :, -1, -2:] = 1.0
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[..., :-2]


@lru_cache(maxsize=2)  # of a micro batch, with and without a window: a mask of 32,768 tokens takes 1 GiB
def visible_keys(queries: int, keys: int, window: int | None, with_sink: bool, device: torch.device) -> torch.Tensor:
    """Return the mask [queries, keys] that is true where a query sees a key; `with_sink`: all see one more key, the last."""
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return F.pad(visible, (0, 1), value=True) if with_sink else visible
