"""Forward and backward over micro batches: the one place where logits meet the tokens they predict.

The model reads a packed stream; its logits at one place predict the token at the next. Here alone that
shift by one happens (see `PackedStream`): everything that goes in or comes out is at token index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.megatron.batch import MicroBatch, PackedStream, pack
from megarl.megatron.vocab import log_probs_and_entropy

Objective = Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""From loss inputs to a loss (scalar, already normalised over everything) and metrics (scalars to be summed)."""


@dataclass(frozen=True)
class Forward:
    """What the last stage computes from the logits."""

    temperature: float
    with_entropy: bool
    vocab_size: int  # entries past it are padding


def configure(config: Any) -> None:
    """Make Megatron add gradients up, plainly, over micro batches and data x context parallel ranks.

    Losses come in normalised over the whole mini batch, so nothing is left to divide by: not the number
    of micro batches or ranks (neither is, with `calculate_per_token_loss`), and no token count (it is
    withheld from finalize_model_grads).
    """
    assert config.calculate_per_token_loss, "must be set when the model is built: DDP reads it there"
    config.finalize_model_grads_func = _finalize_without_token_count


def _finalize_without_token_count(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    finalize_model_grads(chunks, None, **kwargs)


def run(
    chunks: list[Any],
    config: Any,
    micro_batches: list[MicroBatch],
    loss: Callable[[MicroBatch, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, Any]],
    forward: Forward,
    *,
    device: torch.device,
    forward_only: bool,
) -> list[Any] | None:
    """Run the pipeline over `micro_batches`; gradients are left in the DDP buffers.

    `loss(batch, log_probs [T], entropy [T] or None)` is called on the last stage and returns the loss to
    be differentiated and anything to be returned. On the last stage returns these, one a micro batch;
    elsewhere None. Under interleaving (several chunks) the number of micro batches must be a multiple of
    the pipeline stages, which megarl.schedule sees to.
    """
    assert micro_batches, "a step needs at least one micro batch"
    if len(chunks) > 1:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        assert len(micro_batches) % stages == 0, (
            f"{len(micro_batches)} micro batches: the interleaved schedule takes whole rounds of {stages} pipeline stages"
        )
    packed = [(batch, _pack(batch, config, device)) for batch in micro_batches]
    iterators = [iter(packed) for _ in chunks]
    longest = max(stream.share for _, stream in packed)
    results = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, config=config, loss=loss, forward=forward),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(packed),
        seq_length=longest * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None


def _pack(batch: MicroBatch, config: Any, device: torch.device) -> PackedStream:
    return pack(
        batch,
        context_parallel=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        sequence_parallel=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        device=device,
    )


def _forward_step(
    iterator: Iterator[tuple[MicroBatch, PackedStream]], model: Any, *, config: Any, loss: Any, forward: Forward
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's forward step: the model's output, and what to do with it on the last stage."""
    batch, stream = next(iterator)
    offsets = stream.cu_seqlens
    output = model(
        input_ids=stream.tokens[None],
        position_ids=stream.positions[None],
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=stream.longest,
            max_seqlen_kv=stream.longest,
        ),
        # Megatron would copy all logits to float32; `log_probs_and_entropy` does so block by block.
        **({"fp32_output": False} if config.bf16 else {}),
    )

    def last_stage(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        value, result = loss(batch, *at_tokens(logits.squeeze(0), stream, forward))
        return value, torch.zeros([], dtype=torch.int), result  # no token count: see `configure`

    return output, last_stage


def at_tokens(logits: torch.Tensor, stream: PackedStream, forward: Forward) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropy [T] at token index from this rank's logits [share, vocabulary / TP].

    Entry t says how token t was predicted: from the logits one place before it. The first token of a
    sequence is predicted by nothing and has 0. Entropy is None unless asked for.
    """
    log_probs, entropy = log_probs_and_entropy(
        logits,
        stream.labels,
        temperature=forward.temperature,
        vocab_size=forward.vocab_size,
        with_entropy=forward.with_entropy,
        group=_group_or_none(parallel_state.get_tensor_model_parallel_group()),
    )
    context = _group_or_none(parallel_state.get_context_parallel_group())

    def place(rows: torch.Tensor) -> torch.Tensor:
        if context is not None:
            rows = _GatherRanks.apply(rows, context)
        return rows.new_zeros(stream.total).index_put((stream.targets,), rows[stream.sources])

    return place(log_probs), None if entropy is None else place(entropy)


def _group_or_none(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if dist.get_world_size(group) > 1 else None


class _GatherRanks(torch.autograd.Function):
    """All ranks' rows, one rank after the other.

    Each rank then computes the same loss from all rows, so the gradient of a rank's own rows is whole as it
    is: the backward pass takes this rank's part and adds nothing up.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        ctx.rank, ctx.share = dist.get_rank(group), len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[ctx.rank * ctx.share : (ctx.rank + 1) * ctx.share].contiguous(), None
