"""Replace functions of megatron-core 0.16.1 that have defects. docs/upstream.md lists each defect with its test."""

from __future__ import annotations

import torch


def fix_megatron() -> None:
    """Replace Megatron's functions that need a fix. Idempotent."""
    from megatron.core.tensor_parallel import mappings

    mappings._reduce = _reduce


def _reduce(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Return the sum of `tensor` over `group`; in place if it is contiguous.

    Megatron sums a contiguous copy but returns its argument: a non-contiguous gradient misses the other ranks' part.
    """
    if group.size() == 1:
        return tensor
    total = tensor.contiguous()
    torch.distributed.all_reduce(total, group=group)
    return total
