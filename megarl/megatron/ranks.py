"""Coordinates of a rank in the parallel layout, and small collectives over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank in the parallel layout."""

    dp_rank: int
    dp_size: int
    tp_rank: int
    is_last_stage: bool
    reports: bool  # exactly one rank per dp_rank: only its results are used, the other ranks' are equal or None


def coordinates() -> Coordinates:
    """Return the coordinates of this rank. Megatron's process groups must exist."""
    ps = parallel_state
    last = ps.is_pipeline_last_stage(ignore_virtual=True)
    tp, cp = ps.get_tensor_model_parallel_rank(), ps.get_context_parallel_rank()
    return Coordinates(
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        tp_rank=tp,
        is_last_stage=last,
        reports=last and tp == 0 and cp == 0,
    )


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the maximum of `value` over all ranks. Collective."""
    maximum = torch.tensor(value, device=device)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    return maximum.item()


def sum_metrics(contributions: list[dict[str, torch.Tensor]], device: torch.device) -> dict[str, float]:
    """Sum metrics over micro batches and data-parallel ranks. Collective within the data-parallel group.

    Context-parallel ranks compute metrics of whole sequences, so they need no further sum.
    """
    names = sorted(contributions[0])
    if not names:
        return {}
    rows = [
        torch.stack([torch.as_tensor(c[name]).detach().float().to(device) for name in names]) for c in contributions
    ]
    sums = torch.stack(rows).sum(0)
    group = parallel_state.get_data_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(sums, group=group)
    return dict(zip(names, sums.tolist(), strict=True))


def sum_over_data_parallel(numbers: np.ndarray) -> np.ndarray:
    """Return the sum of an array over data-parallel ranks, which have the same shape. Collective within the group, on the
    host."""
    if not numbers.size:
        return numbers
    total = torch.from_numpy(numbers.copy())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group_gloo())
    return total.numpy()


def gather(value: Any) -> list[Any]:
    """Return `value` of every data-parallel rank, on all of them. For small objects: they are pickled."""

    group = parallel_state.get_data_parallel_group_gloo()
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
