"""Which packed stream a layer is computing, for code deep inside a model that needs to know where sequences lie.

Megatron hands `packed_seq_params` to every layer, also when it computes one again in the backward pass; routers
and experts below do not get it. Under pipelining, micro batches alternate, so "the latest one" is no answer.
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
    """Megatron's description of a packed stream, and the stream itself."""

    stream: PackedStream | None = None


def stream_params(stream: PackedStream) -> StreamParams:
    """For Megatron's model; layers of a model that is watched see them of a packed stream alone."""
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


def watch(chunk: Any) -> None:
    """Keep `current` true in all layers of a model chunk."""
    for module in chunk.modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_pre_hook(_remember, with_kwargs=True)
        if isinstance(module, MoELayer) and module.moe_layer_recompute:
            module.router.register_forward_pre_hook(partial(_remember_without_layer, deque()))


def current() -> PackedStream:
    """The stream of the layer that is being computed."""
    assert _current is not None, "no layer of a watched model is being computed"
    return _current


def _remember_without_layer(waiting: deque[PackedStream], router: Any, _: Any) -> None:
    """A mixture of experts that is computed again, and not the layer around it: in the order of the micro batches,
    whatever the pipeline computed in between."""
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
