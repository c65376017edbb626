"""Log-probs, entropy and sums of squared probabilities from hidden states, without all logits at once.

The output layer is split over tensor-parallel ranks. Logits exist for one block of tokens at a time, so peak memory is tokens +
vocabulary instead of tokens x vocabulary. The backward pass recomputes the logits of each block, or reads them back with `keep_logits`. Ranks exchange three
numbers per token (four with sums of squares) and one per label.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

_BLOCK_ELEMENTS = 2**25  # logits per block: 128 MiB in float32
_BLOCK_ELEMENTS_CPU = 2**17  # half a MiB: a block stays in a core's cache between operations
_LEAST_ROWS = 64  # per block: smaller matrix products are slow
_HIDDEN = -1e30  # logit of a padding entry: its probability is 0, and 0 * _HIDDEN is finite


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    with_entropy: bool,
    keep_logits: bool,
    group: dist.ProcessGroup | None,
    fp32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-prob of each label and the entropy of each row under softmax(hidden @ weight.T / temperature).

    `hidden` is [t, h], equal on all ranks of `group`. `weight` is [local entries, h]: ranks hold consecutive,
    equally large shards of the vocabulary; entries from `vocab_size` on are padding and get probability 0.
    `labels` is int64 [t, n], repetitions allowed. Returns float32 [t, n] and float32 [t] (or None), equal on all
    ranks of `group`. `group=None`: the output layer is not split. The gradient of `hidden` is this rank's
    contribution: the caller sums it over `group`. `keep_logits` keeps all logits (t x local entries) for the backward
    pass instead of recomputing them: bit-identical results and a third less work in the output layer. `fp32`: multiply
    float32 copies of `hidden` and `weight` (`megatron.fp32_head`); otherwise bfloat16 rounds every logit to 8 bits.
    """
    if fp32:
        hidden, weight = _in_fp32(hidden, weight)
    keep = keep_logits and torch.is_grad_enabled()
    log_probs, entropy = _LogProbsAndEntropy.apply(
        hidden, weight, labels, temperature, vocab_size, with_entropy, keep, group
    )
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def log_probs_and_squares(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    fp32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each label [t, n], and each row's sum of squared probabilities over the vocabulary [t].

    Both are float32, equal on all ranks of `group`, and carry no gradient. Arguments: see `log_probs_and_entropy`.
    """
    if fp32:
        hidden, weight = _in_fp32(hidden, weight)
    local, here, softmax = _local_labels(weight, labels, temperature, vocab_size, group)
    softmax = replace(softmax, with_squares=True)
    maximum, (total, _, squares, *chosen) = _row_sums(hidden, weight, local, here, softmax, None, group)
    return torch.stack(chosen, 1) - (maximum + total.log())[:, None], squares / total.square()


@dataclass(frozen=True)
class _Softmax:
    """A softmax over the vocabulary, and the sums that are needed. `real`: entries of this rank that are not padding."""

    temperature: float
    real: int
    with_entropy: bool = False
    with_squares: bool = False


def _in_fp32(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def _local_labels(
    weight: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, _Softmax]:
    """Return the labels as entries of this rank's `weight`, which of them this rank holds, and the softmax."""
    width = len(weight)
    first = 0 if group is None else dist.get_rank(group) * width
    here = (labels >= first) & (labels < first + width)
    return torch.where(here, labels - first, 0), here, _Softmax(temperature, min(max(vocab_size - first, 0), width))


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        vocab_size: int,
        with_entropy: bool,
        keep_logits: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local, here, softmax = _local_labels(weight, labels, temperature, vocab_size, group)
        ctx.softmax, ctx.kept = replace(softmax, with_entropy=with_entropy), []
        kept = ctx.kept if keep_logits else None
        maximum, (total, weighted, *chosen) = _row_sums(hidden, weight, local, here, ctx.softmax, kept, group)
        log_total = maximum + total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(log_total)
        ctx.save_for_backward(hidden, weight, local, here, log_total, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return torch.stack(chosen, 1) - log_total[:, None], entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, local, here, log_total, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Accumulate over blocks in float32: bfloat16 would round at each block.
        total_dtype = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=total_dtype) if needs_weight else None
        for number, rows in enumerate(_blocks(hidden, len(weight))):
            logits = ctx.kept[number] if ctx.kept else hidden[rows] @ weight.T
            log_p = _scaled(logits, ctx.softmax) - log_total[rows, None]
            grad_labels = grad_log_probs[rows] / ctx.softmax.temperature
            grad_rows = grad_labels.sum(1, keepdim=True)
            # d log p_y / dz_j = [j = y] - p_j        d H / dz_j = -p_j (log p_j + H)
            if ctx.softmax.with_entropy:
                along = (log_p + entropy[rows, None]).mul_(-grad_entropy[rows, None] / ctx.softmax.temperature)
                grad = along.sub_(grad_rows).mul_(log_p.exp_())
            else:
                grad = log_p.exp_().mul_(-grad_rows)
            grad.scatter_add_(1, local[rows], grad_labels * here[rows])
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _blocks(hidden: torch.Tensor, width: int) -> list[slice]:
    elements = _BLOCK_ELEMENTS_CPU if hidden.device.type == "cpu" else _BLOCK_ELEMENTS
    rows = max(_LEAST_ROWS, elements // width)
    return [slice(start, start + rows) for start in range(0, max(1, len(hidden)), rows)]


def _row_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    local: torch.Tensor,
    here: torch.Tensor,
    softmax: _Softmax,
    kept: list[torch.Tensor] | None,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maximum [t] and sums of `_statistics` of all rows, over all ranks. `kept`: receives each block's logits."""
    parts = []
    for rows in _blocks(hidden, len(weight)):
        logits = hidden[rows] @ weight.T
        parts.append(_statistics(logits, local[rows], here[rows], softmax))
        if kept is not None:
            kept.append(logits)
    local_maximum, sums = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return _over_ranks(local_maximum, sums, softmax, group)


def _scaled(logits: torch.Tensor, softmax: _Softmax) -> torch.Tensor:
    """Return a copy of a block's logits / temperature, float32 (float64 stays), with padding entries at `_HIDDEN`."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if softmax.temperature != 1.0:
        z /= softmax.temperature
    if softmax.real < logits.shape[1]:
        z[:, softmax.real :] = _HIDDEN
    return z


def _statistics(
    logits: torch.Tensor, local: torch.Tensor, here: torch.Tensor, softmax: _Softmax
) -> tuple[torch.Tensor, ...]:
    """Return this rank's max z [rows] and its sums [2 + n, rows], or [3 + n, rows] `with_squares`.

    The sums are sum exp(z - max), sum z exp(z - max), sum exp(2 (z - max)) (`with_squares`), and z of the n labels (0 for
    labels of other ranks).
    """
    z = _scaled(logits, softmax)
    maximum = z.amax(1)
    chosen = z.gather(1, local) * here
    weights = (z - maximum[:, None]).exp_()
    total = weights.sum(1)
    squares = torch.linalg.vector_norm(weights, dim=1).square()[None] if softmax.with_squares else chosen.T[:0]
    weighted = weights.mul_(z).sum(1) if softmax.with_entropy else torch.zeros_like(total)
    return maximum, torch.cat([total[None], weighted[None], squares, chosen.T])


def _over_ranks(
    local_maximum: torch.Tensor, sums: torch.Tensor, softmax: _Softmax, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine maximum [t] and sums of `_statistics` over all ranks of `group`."""
    if group is None:
        return local_maximum, sums
    maximum = local_maximum.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    rescale = (local_maximum - maximum).exp()  # from the local to the global maximum
    sums[:2] *= rescale
    if softmax.with_squares:
        sums[2] *= rescale.square()
    dist.all_reduce(sums, group=group)
    return maximum, sums
