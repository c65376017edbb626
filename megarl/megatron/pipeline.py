"""Run forward and backward passes over micro batches through Megatron's pipeline schedules.

The model's output at position t predicts token t + 1. `PackedStream` and `heads/output_heads.py` handle that shift: all
inputs and outputs of this module are indexed by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.megatron.batch import MicroBatch, PackedStream, pack
from megarl.megatron.current_batch import stream_params
from megarl.megatron.heads.output_heads import OutputHead, language_model
from megarl.megatron.images import ImageLayout

Objective = Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""From loss inputs to a loss (scalar, normalized over the whole mini batch) and metrics (scalars to be summed)."""


def configure(config: Any, chunks: list[Any]) -> None:
    """Make Megatron sum gradients over micro batches and data x context parallel ranks, without any division.

    Losses are already normalized over the mini batch. With `calculate_per_token_loss`, Megatron divides neither by
    micro batches nor by ranks; finalize_model_grads receives no token count, so it does not divide either.
    """
    assert config.calculate_per_token_loss, "must be set when the model is built: DDP reads it there"
    config.finalize_model_grads_func = _finalize_without_token_count
    _set_sync_functions(config, chunks)


def _set_sync_functions(config: Any, chunks: list[Any]) -> None:
    """Pass the sync functions of DDP-wrapped `chunks` to Megatron's schedules, as Megatron's training loop does.

    Each gradient bucket is then reduced as soon as the last micro batch's backward pass fills it; with
    `align_param_gather` all stages gather together.
    """
    settings = getattr(chunks[0], "ddp_config", None)
    if settings is None or not settings.overlap_grad_reduce:
        return
    config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if settings.overlap_param_gather and settings.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def finish_param_gather(chunks: list[Any]) -> None:
    """Gather parameters that the last update left sharded, and wait for running gathers. Collective over data parallel.

    With `overlap_param_gather`, an optimizer step updates only this rank's shard, and forward hooks gather each bucket when
    a module needs it. Any other reader of the weights must call this function first.
    """
    for chunk in chunks:
        if not getattr(chunk, "use_forward_hook", False):  # not DDP-wrapped, or gathered by the optimizer step
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


def _finalize_without_token_count(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    finalize_model_grads(chunks, None, **kwargs)


def run_pipeline(
    chunks: list[Any],
    config: Any,
    micro_batches: list[MicroBatch],
    loss: Callable[..., tuple[torch.Tensor, Any]],
    head: OutputHead,
    *,
    device: torch.device,
    forward_only: bool,
    packing: bool = True,
    image_layout: ImageLayout | None = None,
) -> list[Any] | None:
    """Run the pipeline over `micro_batches`; gradients accumulate in the DDP buffers.

    On the last stage, `loss(batch, *head(...))` returns the loss to differentiate and any result. Returns these
    results there, one per micro batch; None on other stages. With several chunks (interleaved schedule) the number of
    micro batches must be a multiple of the pipeline stages; megarl.batching.packing ensures it.
    """
    assert micro_batches, "a step needs at least one micro batch"
    if len(chunks) > 1:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        assert len(micro_batches) % stages == 0, (
            f"{len(micro_batches)} micro batches: the interleaved schedule needs a multiple of {stages} pipeline stages"
        )
    packed = [(batch, _pack(batch, config, device, packing, image_layout)) for batch in micro_batches]
    iterators = [iter(packed) for _ in chunks]
    longest = max(stream.share for _, stream in packed)
    results = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, config=config, loss=loss, head=head),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(packed),
        seq_length=longest * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None


def _pack(
    batch: MicroBatch, config: Any, device: torch.device, packing: bool, image_layout: ImageLayout | None
) -> PackedStream:
    return pack(
        batch,
        context_parallel=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        sequence_parallel=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        device=device,
        packing=packing,
        image_layout=image_layout,
    )


def _forward_step(
    iterator: Iterator[tuple[MicroBatch, PackedStream]], model: Any, *, config: Any, loss: Any, head: OutputHead
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Return the model's output and the last-stage loss function, as Megatron's schedules expect."""
    batch, stream = next(iterator)
    output = model(
        input_ids=stream.as_read(stream.tokens),
        position_ids=stream.as_read(stream.positions),
        attention_mask=None,
        packed_seq_params=stream_params(stream),
        # By default Megatron returns a float32 copy of the output.
        **({"fp32_output": False} if config.bf16 or config.fp16 else {}),
        **({"images": stream.images} if stream.images is not None else {}),
    )

    def last_stage(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        rows = hidden.transpose(0, 1).flatten(0, 1)  # from [b, s, h]
        value, result = loss(batch, *head(language_model(model), rows, stream))
        return value, torch.zeros([], dtype=torch.int), result  # no token count: see `configure`

    return output, last_stage
