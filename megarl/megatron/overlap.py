"""Communication beside computation (`megatron.ddp`): hooks for Megatron's schedules, and the point where weights are whole.

With `overlap_grad_reduce` each bucket of gradients is reduced as soon as the last micro batch's backward pass has filled it.
With `overlap_param_gather` an optimizer step updates this rank's shard alone, and forward hooks gather each bucket when a
module needs it. Whatever reads weights outside of a training forward calls `settle` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def drive(config: Any, chunks: list[Any]) -> None:
    """Give Megatron's schedules what they need of DDP-wrapped `chunks`, as Megatron's own training loop does: gradients
    are reduced in the last micro batch alone, and with `align_param_gather` all stages gather at once."""
    settings = getattr(chunks[0], "ddp_config", None)
    if settings is None or not settings.overlap_grad_reduce:
        return
    config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if settings.overlap_param_gather and settings.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def settle(chunks: list[Any]) -> None:
    """Gather what the last update left in shards, and wait for gathers that run. All data-parallel ranks together."""
    for chunk in chunks:
        if not getattr(chunk, "use_forward_hook", False):  # not DDP-wrapped, or gathered by the optimizer step
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    return functions if len(functions) > 1 else functions[0]
