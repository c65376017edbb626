"""Offsets of packed sequences on the host, for layers that receive them as a tensor on the device.

Reading a tensor of the device makes the host wait for every kernel that has been queued. The batch is planned on the
host, so its offsets are there already: `remember` keeps them beside the tensor that Megatron hands to every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_offsets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(cu_seqlens: torch.Tensor, offsets: Sequence[int]) -> None:
    """Keep the values of `cu_seqlens` [sequences + 1] for as long as the tensor lives."""
    assert len(offsets) == len(cu_seqlens), (len(offsets), len(cu_seqlens))
    _offsets[cu_seqlens] = tuple(offsets)


def host_offsets(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Values of `cu_seqlens` [sequences + 1].

    A tensor that was never remembered, such as a vision tower's, is read from the device, once.
    """
    offsets = _offsets.get(cu_seqlens)
    if offsets is None:
        offsets = _offsets[cu_seqlens] = tuple(cu_seqlens.tolist())
    return offsets
