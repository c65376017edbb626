"""What the last pipeline stage computes for each token from the model's hidden states.

The model returns the hidden states that its output layer would read (`hidden_states_out`), so that a head
decides how much of the output layer exists at a time. Here, and in `PackedStream`, a row is matched with the
token it predicts; everything that goes out is at token index.
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
from megarl.megatron.vocab import log_probs_and_entropy

IMPOSSIBLE = -1e4
"""Log-probability of a token that the model does not have: exp of it is 0, and 0 times it is still a number."""


class Head(Protocol):
    """From hidden states [rows of this rank, h] to tensors [T] at token index (None: not asked for)."""

    def __call__(self, model: Any, hidden: torch.Tensor, stream: PackedStream) -> tuple[torch.Tensor | None, ...]: ...


@dataclass(frozen=True)
class PolicyHead:
    """Log-probs, and where asked for entropy, and the log-probs of a micro batch's `candidates`.

    Entry t says how token t was predicted: from the row one place before it. The first token of a sequence is
    predicted by nothing and has 0.
    """

    temperature: float
    with_entropy: bool
    with_candidates: bool  # where the micro batch has any
    vocab_size: int  # entries past it are padding
    keep_logits: bool  # for the backward pass, instead of computing them again

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
            group=_group_or_none(parallel_state.get_tensor_model_parallel_group()),
        )
        return (
            at_predicted_tokens(log_probs[:, 0], stream),
            None if entropy is None else at_predicted_tokens(entropy, stream),
            None
            if candidates is None
            else at_predicted_tokens(_none_is_impossible(log_probs[:, 1:], candidates), stream),
        )


def _none_is_impossible(log_probs: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """`log_probs` [share, K], and `IMPOSSIBLE` for candidates that are none."""
    return log_probs.where(candidates >= 0, log_probs.new_full((), IMPOSSIBLE))


def language_model(chunk: Any) -> Any:
    """Megatron's GPTModel inside a wrapped model chunk."""
    return next(module for module in chunk.modules() if isinstance(module, GPTModel))


def hidden_states_out(model: Any) -> None:
    """Let a GPTModel of the last stage return the hidden states that its output layer would read."""
    model.output_layer.forward = lambda hidden, **_: (hidden, None)


def output_weight(model: Any) -> torch.Tensor:
    """The output layer's weight on this rank [entries, h]: its own, or the embedding's where they are tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def whole_rows(hidden: torch.Tensor, config: Any) -> torch.Tensor:
    """All rows of this context-parallel rank [share, h] on each tensor-parallel rank. The backward pass sums the
    ranks' gradients."""
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden)
    return copy_to_tensor_model_parallel_region(hidden)


def at_predicted_tokens(rows: torch.Tensor, stream: PackedStream) -> torch.Tensor:
    """Rows of this context-parallel rank [share, ...] -> each at the token that it predicts [T, ...], on every rank."""
    group = _group_or_none(parallel_state.get_context_parallel_group())
    if group is not None:
        rows = _GatherRanks.apply(rows, group)
    return rows.new_zeros(stream.total, *rows.shape[1:]).index_put((stream.targets,), rows[stream.sources])


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
