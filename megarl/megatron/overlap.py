"""Overlap of DDP communication with computation (`megatron.ddp`).

With `overlap_grad_reduce`, each gradient bucket is reduced as soon as the last micro batch's backward pass fills it.
With `overlap_param_gather`, an optimizer step updates only this rank's shard, and forward hooks gather each bucket when
a module needs it. Any other reader of the weights must call `finish_param_gather` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def set_sync_functions(config: Any, chunks: list[Any]) -> None:
    """Pass the sync functions of DDP-wrapped `chunks` to Megatron's schedules, as Megatron's training loop does.

    Gradients are then reduced in the last micro batch only; with `align_param_gather` all stages gather together.
    """
    settings = getattr(chunks[0], "ddp_config", None)
    if settings is None or not settings.overlap_grad_reduce:
        return
    config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if settings.overlap_param_gather and settings.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def finish_param_gather(chunks: list[Any]) -> None:
    """Gather parameters that the last update left sharded, and wait for running gathers. Collective over data parallel."""
    for chunk in chunks:
        if not getattr(chunk, "use_forward_hook", False):  # not DDP-wrapped, or gathered by the optimizer step
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    return functions if len(functions) > 1 else functions[0]
