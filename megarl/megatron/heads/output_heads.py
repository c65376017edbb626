"""Output heads: per-token results that the last pipeline stage computes from hidden states.

The model returns the hidden states that its output layer would read (`hidden_states_out`), so an output head decides
how many logits exist at a time. Output heads and `PackedStream` map each row to the token that it predicts; results
are indexed by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megarl.megatron.batch import PackedStream
from megarl.megatron.heads.log_probs import log_probs_and_entropy, log_probs_and_squares

IMPOSSIBLE = -1e4
"""Log-prob of a token outside the vocabulary: its exp is 0, and 0 * IMPOSSIBLE is finite."""


class OutputHead(Protocol):
    """Map hidden states [rows of this rank, h] to tensors [T] at token index (None: not requested)."""

    def __call__(self, model: Any, hidden: torch.Tensor, stream: PackedStream) -> tuple[torch.Tensor | None, ...]: ...


@dataclass(frozen=True)
class PolicyHead:
    """Log-probs; optionally entropy, and log-probs of a micro batch's `candidates`.

    Entry t belongs to token t and comes from the row before it. The first token of a sequence has no prediction: 0.
    """

    temperature: float
    with_entropy: bool
    with_candidates: bool  # ignored for a micro batch without candidates
    vocab_size: int  # entries past it are padding
    keep_logits: bool  # for the backward pass, instead of recomputing them
    fp32: bool = False  # compute logits and their gradients in float32

    def __call__(self, model: Any, hidden: torch.Tensor, stream: PackedStream) -> tuple[torch.Tensor | None, ...]:
        labels = stream.labels[:, None]
        candidates = None
        if self.with_candidates and stream.candidates is not None:
            candidates = stream.candidates.to(labels.device).long()
            labels = torch.cat([labels, candidates], 1)
        log_probs, entropy = log_probs_and_entropy(
            whole_rows(hidden, model.config),
            output_weight(model),
            labels,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            with_entropy=self.with_entropy,
            keep_logits=self.keep_logits,
            fp32=self.fp32,
            group=_group_or_none(parallel_state.get_tensor_model_parallel_group()),
        )
        return (
            at_predicted_tokens(log_probs[:, 0], stream),
            None if entropy is None else at_predicted_tokens(entropy, stream),
            None
            if candidates is None
            else at_predicted_tokens(log_probs[:, 1:].masked_fill(candidates < 0, IMPOSSIBLE), stream),
        )


@dataclass(frozen=True)
class SquaresHead:
    """Log-probs, and each position's sum of squared probabilities over the vocabulary, without gradients.

    Entry t belongs to token t, as in `PolicyHead`; the first token of a sequence has 0 for both.
    """

    temperature: float
    vocab_size: int
    fp32: bool = False

    def __call__(self, model: Any, hidden: torch.Tensor, stream: PackedStream) -> tuple[torch.Tensor | None, ...]:
        log_probs, squares = log_probs_and_squares(
            whole_rows(hidden, model.config),
            output_weight(model),
            stream.labels[:, None],
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            fp32=self.fp32,
            group=_group_or_none(parallel_state.get_tensor_model_parallel_group()),
        )
        return at_predicted_tokens(log_probs[:, 0], stream), at_predicted_tokens(squares, stream)


def language_model(chunk: Any) -> Any:
    """Return Megatron's GPTModel inside a wrapped model chunk."""
    return next(module for module in chunk.modules() if isinstance(module, GPTModel))


def hidden_states_out(model: Any) -> None:
    """Make a last-stage GPTModel return the hidden states that its output layer would read."""
    model.output_layer.forward = lambda hidden, **_: (hidden, None)


def output_weight(model: Any) -> torch.Tensor:
    """Return the output layer's weight on this rank [local entries, h]: the embedding's if they are tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def whole_rows(hidden: torch.Tensor, config: Any) -> torch.Tensor:
    """Gather all rows of this context-parallel rank [share, h] on each tensor-parallel rank.

    The backward pass sums the gradients of the tensor-parallel ranks.
    """
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden)
    return copy_to_tensor_model_parallel_region(hidden)


def at_predicted_tokens(rows: torch.Tensor, stream: PackedStream) -> torch.Tensor:
    """Move rows of this context-parallel rank [share, ...] to the tokens they predict [T, ...], on every rank."""
    group = _group_or_none(parallel_state.get_context_parallel_group())
    if group is not None:
        rows = _GatherRanks.apply(rows, group)
    return rows.new_zeros(stream.total, *rows.shape[1:]).index_put((stream.targets,), rows[stream.sources])


def _group_or_none(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if dist.get_world_size(group) > 1 else None


class _GatherRanks(torch.autograd.Function):
    """Concatenate the rows of all ranks.

    Every rank then computes the same loss from all rows, so the gradient of a rank's rows is already complete: the
    backward pass returns this rank's slice without a reduction.
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
