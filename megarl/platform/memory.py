"""Host memory: copies of device memory, and what moves the optimizer's states out of the device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def swapped_parts(extra: Mapping[str, Any]) -> int | None:
    """In how many parts MindSpeed's swap_optimizer of `megatron.extra` brings master weights and moments from the host to
    the device, where it is on. 16 is its default: docs/zh/features/swap-optimizer.md of MindSpeed's sources."""
    return int(extra.get("swap_optimizer_times", 16)) if extra.get("swap_optimizer") else None


MIB = 1 << 20


def pinned(size: int) -> int:
    """Bytes that page-locked memory of `size` bytes takes: the next power of two (ATen/core/CachingHostAllocator.h, whose
    class torch_npu's allocator derives from). What is freed stays in its cache."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def asleep(sizes: Iterable[int]) -> int:
    """Bytes on the host of an engine rank that sleeps and keeps its weights, whose tensors have `sizes`.

    vLLM and vllm-ascend copy each segment of the pool into page-locked memory of its own (camem.py:211, cumem.py). torch
    makes segments of 2 MiB for tensors below 1 MiB, of 20 MiB for those below 10 MiB, and one of a multiple of 2 MiB for each
    larger tensor (c10/cuda/CUDACachingAllocator.cpp: get_allocation_size).
    """
    total = small = medium = 0
    for size in sizes:
        if size < MIB:
            small += size
        elif size < 10 * MIB:
            medium += size
        else:
            total += pinned(-(-size // (2 * MIB)) * 2 * MIB)
    return total + -(-small // (2 * MIB)) * pinned(2 * MIB) + -(-medium // (20 * MIB)) * pinned(20 * MIB)
