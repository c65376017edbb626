"""Recipe settings of the library that adapts Megatron to a device (MindSpeed on Ascend), and sizes of host copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.platform.mindspeed import contradictions
from megarl.platform.mindspeed import settings as mindspeed

Problem = tuple[str, str]  # description, remedy
MIB = 1 << 20


@dataclass(frozen=True)
class Adaptor:
    """The adapting library of a device kind; without label and settings on devices that Megatron supports itself."""

    device: str
    label: str = ""  # name and version; "": no library
    settings: frozenset[str] = frozenset()

    def problem(self, name: str, value: Any) -> Problem | None:
        """Check an entry of `megatron.extra` that is not a Megatron field; None if it is valid or unknown here."""
        if self.label:
            return mindspeed.problem(name, value)
        if name in mindspeed.names():
            description = (
                f"only {mindspeed.label()} reads it, which adapts Megatron to Ascend devices; it has no effect on "
                f"{self.device}"
            )
            return description, "leave it out, or set cluster.device: npu"
        return None

    def contradiction(self, settings: Mapping[str, Any]) -> tuple[str, Problem] | None:
        """Return the first of `settings` that contradicts others, with the problem. Keys are Megatron's names."""
        rule = contradictions.contradiction(mindspeed.arguments(settings)) if self.label else None
        if rule is None:
            return None
        return rule.name, (f"{rule.problem} (MindSpeed's {rule.file})", rule.remedy)

    def latent_attention_problem(self, mscale: float, mscale_all_dim: float) -> Problem | None:
        """Problem of these YaRN fields in the device's latent attention; None if it supports them."""
        return mindspeed.latent_attention_problem(mscale, mscale_all_dim) if self.label else None

    def zero_centered_norm_problem(self) -> Problem | None:
        """Problem of norms that add 1 to their weights; None if the device's layers support them."""
        return mindspeed.zero_centered_norm_problem() if self.label else None

    def sparse_attention_problem(self) -> Problem | None:
        """Problem of sparse attention; None if the device's layers support it."""
        return mindspeed.sparse_attention_problem() if self.label else None

    def biased_softmax_problem(self) -> Problem | None:
        """Problem of routing by a softmax with a bias; None if the device's layers support it."""
        return mindspeed.biased_softmax_problem() if self.label else None

    def sinks_problem(self) -> Problem | None:
        """Problem of attention sinks and sliding windows; None if the device's layers support them."""
        return mindspeed.sinks_problem() if self.label else None


def adaptor(device: str) -> Adaptor:
    """Return the adaptor of a device kind: "cpu", "cuda" or "npu"."""
    return Adaptor(device, mindspeed.label(), mindspeed.names()) if device == "npu" else Adaptor(device)


def swapped_parts(extra: Mapping[str, Any]) -> int | None:
    """Number of parts in which MindSpeed's swap_optimizer moves master weights and moments to the device; None if off.

    `extra`: the recipe's `megatron.extra`. 16 is MindSpeed's default (docs/zh/features/swap-optimizer.md in its sources).
    """
    return int(extra.get("swap_optimizer_times", 16)) if extra.get("swap_optimizer") else None


def pinned(size: int) -> int:
    """Bytes that page-locked memory of `size` bytes takes: the next power of two.

    See ATen/core/CachingHostAllocator.h, the base class of torch_npu's allocator. Freed blocks stay in its cache.
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


def asleep(sizes: Iterable[int]) -> int:
    """Host memory in bytes of a sleeping engine rank that keeps its weights. `sizes`: bytes of its tensors.

    vLLM and vllm-ascend copy each segment of the pool into separate page-locked memory (camem.py:211, cumem.py). torch
    allocates segments of 2 MiB for tensors below 1 MiB, of 20 MiB for tensors below 10 MiB, and one segment of a multiple
    of 2 MiB for each larger tensor (c10/cuda/CUDACachingAllocator.cpp: get_allocation_size).
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
