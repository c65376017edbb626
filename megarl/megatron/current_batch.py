"""Make the packed stream of a micro batch available inside layers: `current` returns the stream of the layer being computed.

Routers and experts need its sequence boundaries. Megatron passes `packed_seq_params` to every layer, also when it recomputes a
layer in the backward pass, but not to routers and experts. Pipeline schedules alternate between micro batches, so the latest
micro batch may be the wrong one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.megatron.batch import PackedStream
from megarl.megatron.host_offsets import remember

_current: PackedStream | None = None


@dataclass
class StreamParams(PackedSeqParams):
    """Megatron's description of a packed stream, with the stream."""

    stream: PackedStream | None = None


def stream_params(stream: PackedStream) -> StreamParams:
    """Return the parameters for Megatron's model. A tracked model's layers only receive them for a packed stream."""
    if not stream.packed:
        return StreamParams(qkv_format="sbhd", max_seqlen_q=stream.longest, max_seqlen_kv=stream.longest, stream=stream)
    offsets = stream.cu_seqlens
    remember(offsets, stream.offsets)
    return StreamParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=stream.longest,
        max_seqlen_kv=stream.longest,
        stream=stream,
    )


def track_current(chunk: Any) -> None:
    """Register hooks that keep `current` up to date in all layers of a model chunk."""
    for module in chunk.modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_pre_hook(_remember, with_kwargs=True)
        if isinstance(module, MoELayer) and module.moe_layer_recompute:
            module.router.register_forward_pre_hook(partial(_remember_without_layer, deque()))


def current() -> PackedStream:
    """Return the stream of the layer being computed."""
    assert _current is not None, "no layer of a tracked model is being computed"
    return _current


def _remember_without_layer(waiting: deque[PackedStream], router: Any, _: Any) -> None:
    """Restore the stream for an MoE layer that is recomputed without its transformer layer.

    Recomputation follows the order of the micro batches, independent of the pipeline's order in between.
    """
    global _current
    if not router.training:
        return
    if torch.is_grad_enabled():
        _current = waiting.popleft()
    else:
        waiting.append(current())


def _remember(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    global _current
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, StreamParams):
        return None
    assert params.stream is not None
    _current = params.stream
    return None if params.stream.packed else (args, {**kwargs, "packed_seq_params": None})
