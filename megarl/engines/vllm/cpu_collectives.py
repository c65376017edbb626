"""Collectives with uneven sizes, which vLLM lacks on a CPU and which expert parallelism over engines needs.

Each engine of a group contributes its own number of tokens. vLLM gathers all tokens on every rank, each rank computes its
experts' outputs, and vLLM sums these on the rank of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def fix_uneven_collectives_on_cpu() -> None:
    """Add `all_gatherv` and `reduce_scatterv` to vLLM's CPU communicator, unless it implements them."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for function in (all_gatherv, reduce_scatterv):
        if getattr(CpuCommunicator, function.__name__, None) is getattr(
            DeviceCommunicatorBase, function.__name__, None
        ):
            setattr(CpuCommunicator, function.__name__, function)


def all_gatherv(
    self: Any, input_: torch.Tensor | Sequence[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate the rows of all ranks; rank r contributes `sizes[r]` rows. `input_` may be several tensors."""
    assert dim == 0, "vLLM gathers tokens, which are rows"
    if not isinstance(input_, torch.Tensor):
        return [_gather(self, tensor, sizes) for tensor in input_]
    return _gather(self, input_, sizes)


def _gather(communicator: Any, rows: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
    sizes = sizes or [len(rows)] * communicator.world_size
    assert len(rows) == sizes[communicator.rank_in_group]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])  # gloo gathers only parts of equal size
    padded[: len(rows)] = rows
    gathered = rows.new_empty(len(sizes) * len(padded), *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=communicator.device_group)
    parts = gathered.split(len(padded))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Sum `input_` over ranks; return this rank's `sizes[rank]` rows."""
    assert dim == 0, "vLLM scatters tokens, which are rows"
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=self.device_group)
    sizes = sizes or [len(total) // self.world_size] * self.world_size
    return total.split(list(sizes))[self.rank_in_group].contiguous()
