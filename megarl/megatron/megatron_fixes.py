"""Mends of megatron-core 0.16.1 that have no place of their own; docs/upstream.md lists all mends."""

from __future__ import annotations

import torch


def install() -> None:
    """Put the mends in place, in this process. Twice is as good as once."""
    from megatron.core.tensor_parallel import mappings

    mappings._reduce = _reduce


def _reduce(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """The sum of `tensor` over `group`; in place where it is contiguous.

    Megatron sums a contiguous copy and returns the tensor that came in, which is another where it was not
    contiguous: a gradient that misses the other ranks' part.
    """
    if group.size() == 1:
        return tensor
    total = tensor.contiguous()
    torch.distributed.all_reduce(total, group=group)
    return total
