"""Read optimizer states that MindSpeed's `swap_optimizer` keeps on the host between updates.

MindSpeed (core_r0.16.0, mindspeed/core/optimizer/swap_optimizer/swap_optimizer.py) keeps the device storages of float32
masters and moments empty and fills them during a step, part by part, from page-locked host tensors. The attribute names
below are recorded in `mindspeed/tables/`, which tests compare with the sources.
"""

from __future__ import annotations

from typing import Any

import torch

HOST_TENSORS = "param_to_cpu_states_map"
"""Class attribute: main parameter -> {"param" | "exp_avg" | "exp_avg_sq" | "max_exp_avg_sq": host tensor or None}."""
TO_HOST = "swap_to_host_stream"
"""Class attribute: stream of a step's copies to the host."""
SWAPS = "is_swap_optimizer"
"""Attribute of the inner optimizer."""


def wait_for_host_tensors(member: Any) -> None:
    """Wait for the copies to the host that the last step started. No effect without swap_optimizer."""
    stream = getattr(member, TO_HOST, None)
    if stream is not None:
        stream.synchronize()


def resident(member: Any, main: torch.Tensor, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the values of `main` (`name` is "param") or of its moment `name`.

    `tensor` is the optimizer's tensor; it is returned if its storage is not empty, which always holds without
    swap_optimizer. Raises RuntimeError if the storage is empty and the optimizer has no copy on the host.
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
    """Return `count` in the type of the step count in the inner optimizer's groups: a tensor with swap_optimizer."""
    if not getattr(optimizer, SWAPS, False):
        return count
    return torch.tensor(count, dtype=torch.int64, device=torch.cuda.current_device())
