"""Host copies of packed-sequence offsets that layers receive as device tensors.

Reading a device tensor synchronizes with all queued kernels. The batch is planned on the host, so `remember` stores the
host values for the tensor that Megatron passes to every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_offsets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(cu_seqlens: torch.Tensor, offsets: Sequence[int]) -> None:
    """Store the values of `cu_seqlens` [sequences + 1] until the tensor is freed."""
    assert len(offsets) == len(cu_seqlens), (len(offsets), len(cu_seqlens))
    _offsets[cu_seqlens] = tuple(offsets)


def host_offsets(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Return the values of `cu_seqlens` [sequences + 1].

    A tensor without stored values, such as a vision tower's, is copied from the device once.
    """

    offsets = _offsets.get(cu_seqlens)
    if offsets is None:
        offsets = _offsets[cu_seqlens] = tuple(cu_seqlens.tolist())
    return offsets
