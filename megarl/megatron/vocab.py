"""Log-probabilities and entropy from logits that are cut over tensor-parallel ranks.

The logits of one rank never leave it: ranks exchange three numbers a token. Both results carry
gradients, and the backward pass computes the probabilities again from the logits, block by block, so
that no float32 copy of all logits is held.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_BLOCK_ELEMENTS = 2**25  # of a block: 128 MiB in float32
_BLOCK_ELEMENTS_CPU = 2**17  # half a MiB: a block stays in a core's cache from one operation to the next
_HIDDEN = -1e30  # logit of a padding entry: its probability is 0, and 0 times it is still a number


def log_probs_and_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    with_entropy: bool,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each label and entropy of each row, of softmax(logits / temperature).

    `logits` is [t, entries of this rank]; ranks of `group` hold consecutive parts of equal size, of which
    entries from `vocab_size` on are padding and get no probability. `labels` is int64 [t]. Returns
    float32 [t] and float32 [t] (or None), equal on all ranks of `group`. `group=None`: not cut.
    """
    log_probs, entropy = _LogProbsAndEntropy.apply(logits, labels, temperature, vocab_size, with_entropy, group)
    return log_probs, entropy if with_entropy else None


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        vocab_size: int,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits.shape[1]
        first = 0 if group is None else dist.get_rank(group) * width
        ctx.temperature, ctx.real, ctx.with_entropy = temperature, min(max(vocab_size - first, 0), width), with_entropy
        here = (labels >= first) & (labels < first + width)
        local = torch.where(here, labels - first, 0)

        blocks = _blocks(logits)
        maxima = torch.cat([_scaled(logits[rows], ctx).amax(1) for rows in blocks])
        if group is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack(
            [
                torch.cat(x)
                for x in zip(*(_sums(logits, local, here, maxima, rows, ctx) for rows in blocks), strict=True)
            ]
        )
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        log_total = maxima + total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(log_total)
        ctx.save_for_backward(logits, local, here, log_total, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        logits, local, here, log_total, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _blocks(logits):
            z = _scaled(logits[rows], ctx)
            log_p = z - log_total[rows, None]
            grad_rows = grad_log_probs[rows] / ctx.temperature
            # d log p_y / dz_j = [j = y] - p_j        d H / dz_j = -p_j (log p_j + H)
            if ctx.with_entropy:
                along = (log_p + entropy[rows, None]).mul_(-grad_entropy[rows, None] / ctx.temperature)
                grad = along.sub_(grad_rows[:, None]).mul_(log_p.exp_())
            else:
                grad = log_p.exp_().mul_(-grad_rows[:, None])
            grad.scatter_add_(1, local[rows, None], (grad_rows * here[rows])[:, None])
            result[rows] = grad
        return result, None, None, None, None, None


def _blocks(logits: torch.Tensor) -> list[slice]:
    elements = _BLOCK_ELEMENTS_CPU if logits.device.type == "cpu" else _BLOCK_ELEMENTS
    rows = max(1, elements // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, max(1, len(logits)), rows)]


def _scaled(block: torch.Tensor, ctx: Any) -> torch.Tensor:
    """Logits of a block over temperature, in float32 (float64 stays), padding entries hidden."""
    z = block if block.dtype == torch.float64 else block.float()
    if ctx.temperature != 1.0:
        z = z / ctx.temperature
    if ctx.real < block.shape[1]:
        z = z.clone() if z.data_ptr() == block.data_ptr() else z
        z[:, ctx.real :] = _HIDDEN
    return z


def _sums(
    logits: torch.Tensor, local: torch.Tensor, here: torch.Tensor, maxima: torch.Tensor, rows: slice, ctx: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of sum exp(z - max), sum z exp(z - max), and z of the label; each [rows]."""
    z = _scaled(logits[rows], ctx)
    weights = (z - maxima[rows, None]).exp_()
    total = weights.sum(1)
    weighted = (weights * z).sum(1) if ctx.with_entropy else torch.zeros_like(total)
    chosen = z.gather(1, local[rows, None]).squeeze(1) * here[rows]
    return total, weighted, chosen
