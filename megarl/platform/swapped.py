"""States of an optimizer that MindSpeed's `swap_optimizer` keeps on the host between updates.

MindSpeed (core_r0.16.0, mindspeed/core/optimizer/swap_optimizer/swap_optimizer.py) leaves the storages of float32
masters and moments on the device empty and fills them from page-locked host tensors, part by part, in a step. The names
read here are recorded in `mindspeed_tables/`, which tests compare with the sources.
"""

from __future__ import annotations

from typing import Any

import torch

HOST_TENSORS = "param_to_cpu_states_map"
"""Class attribute: main parameter -> {"param" | "exp_avg" | "exp_avg_sq" | "max_exp_avg_sq": host tensor or None}."""
TO_HOST = "swap_to_host_stream"
"""Class attribute: the stream on which a step copies to the host."""
SWAPS = "is_swap_optimizer"
"""Attribute of the inner optimizer."""


def wait_for_host_tensors(member: Any) -> None:
    """Return once the copies that the last step started have arrived on the host. Nothing to do without a swap."""
    stream = getattr(member, TO_HOST, None)
    if stream is not None:
        stream.synchronize()


def resident(member: Any, main: torch.Tensor, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the values of `main` (`name` is "param") or of its moment `name`.

    `tensor` is the optimizer's, which is also the result where it has its memory: always without a swap. Raises
    RuntimeError for a tensor whose memory is gone and of which the optimizer has no copy on the host.
    """
    if tensor.untyped_storage().size() > 0 or tensor.numel() == 0:
        return tensor
    copies = getattr(member, HOST_TENSORS, {}).get(main, {})
    if copies.get(name) is None:
        raise RuntimeError(
            f"an optimizer state ({name}, {tensor.numel()} elements) has no memory and no copy on the host"
        )
    host: torch.Tensor = copies[name]
    return host


def count_of_updates(optimizer: Any, count: int) -> int | torch.Tensor:
    """Return `count` as `optimizer`, the inner one, keeps it in a parameter group: a swapping step adds to a tensor."""
    if not getattr(optimizer, SWAPS, False):
        return count
    return torch.tensor(count, dtype=torch.int64, device=torch.cuda.current_device())
