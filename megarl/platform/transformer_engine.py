"""Transformer Engine: its installed version, its compatibility with Megatron, and the attention that it lacks on some devices.

For runs, recipe checks and doctor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from megarl.platform.version_sets import meets, version_of

WANTED = ">=2.9,<2.12"
"""Versions that megatron-core 0.16.1 requires, by the extra `dev` in its metadata."""

PARTS = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
"""Its distributions. The first has the version of Transformer Engine as a whole."""

FLASH_ATTENTION = ">=2.7.3,<=2.8.3"
"""Versions of flash-attn that Transformer Engine 2.10 and 2.11 use on every device (FlashAttentionUtils, attention/dot_product_attention/utils.py)."""

NATIVE_LAYERS = (
    "uninstall transformer-engine, transformer-engine-torch and transformer-engine-cu13, and trainers use megarl's native layers "
    "(docs/cuda.md)"
)
"""Remedy without Transformer Engine."""
_UNFUSED = "; megatron.extra.attention_backend=unfused stores the scores, which `plan` does not count"

Capability = tuple[int, int]  # compute capability of a device


def installed(version_of: Callable[[str], str | None] = version_of) -> dict[str, str]:
    """Versions of the installed parts, by distribution. `version_of`: lookup of a distribution's version or None."""
    return {name: version for name in PARTS if (version := version_of(name))}


def is_importable() -> bool:
    """Return True if this environment has the package `transformer_engine`."""
    return importlib.util.find_spec("transformer_engine") is not None


def version_of_whole() -> str | None:
    """Version of Transformer Engine in this environment, or None. Builds from source may have only a CUDA distribution."""
    return next(iter(installed().values()), None) if is_importable() else None


def is_at_least(version: str | None, since: str) -> bool:
    """Return True if `version` is `since` or later; False for None and invalid versions."""
    try:
        return version is not None and Version(version) >= Version(since)
    except InvalidVersion:
        return False


def problem_of(version: str) -> str | None:
    """Message for a version that megatron-core does not support; None if it does."""
    if meets(version, WANTED):
        return None
    return f"transformer-engine {version} is untested: megatron-core 0.16.1 requires {WANTED}"


@dataclass(frozen=True)
class AttentionNeeds:
    """A model's attention in 16-bit training, as far as it selects one of Transformer Engine's kernels."""

    query_size: int  # elements of a head of queries and keys
    value_size: int
    packed: bool
    sinks: bool
    deterministic: bool
    backend: str = "auto"  # Megatron's attention_backend


def attention_problem(needs: AttentionNeeds, capability: Capability, flash_attn: str | None) -> tuple[str, str] | None:
    """Problem and remedy if Transformer Engine has no fused attention for a model on a device; None if it has.

    It would fail in the first pass, or fall back to attention that stores the scores of all pairs of tokens. flash_attn: version
    of the package, None if it is not installed.
    """
    lacks = _fused_lacks(needs, capability)
    if lacks is None or needs.backend in ("unfused", "local"):  # the user's choice
        return None
    problem = (
        f"Transformer Engine 2.9 to 2.11 has no fused attention {lacks} on compute capability {capability[0]}.{capability[1]}: "
        "the first pass would fail, or store the scores of all pairs of tokens"
    )
    unpacked = needs.packed and _fused_lacks(replace(needs, packed=False), capability) is None
    native = f"{'set megatron.packing=false, or ' if unpacked else ''}{NATIVE_LAYERS}{_UNFUSED}"
    if not _flash_has(needs, capability):
        return f"{problem}. flash-attn does not have it either", native
    steps = []
    if not meets(flash_attn, FLASH_ATTENTION):
        problem += f". flash-attn has it, and {f'{flash_attn} is installed' if flash_attn else 'is not installed'}"
        steps.append("install flash-attn 2.8.3 (2.8.1 with Transformer Engine 2.9)")
    if needs.backend == "fused":
        steps.append("set megatron.extra.attention_backend=flash")
    return (problem, f"{' and '.join(steps)}; or {native}") if steps else None


def _fused_lacks(needs: AttentionNeeds, capability: Capability) -> str | None:
    """The feature that cuDNN's attention lacks for training; None if it has all.

    From nvte_get_fused_attn_backend (common/fused_attn/fused_attn.cpp) and get_attention_backend of 2.9 to 2.11, with cuDNN 9.11
    or later.
    """
    query, value = needs.query_size, needs.value_size
    if capability < (8, 0):
        return "at all"
    if needs.packed and (capability < (9, 0) or capability == (12, 0)):
        return "for packed sequences"
    if needs.deterministic and capability[0] != 9:
        return "with a fixed order of sums (train.deterministic)"
    large = f"for heads of {query} and {value} elements"
    if max(query, value) <= 128:
        return None
    if (query, value) == (192, 128):
        return None if capability[0] >= 9 and capability != (12, 0) else large
    if capability != (9, 0) or max(query, value) > 256:
        return large
    return large if query != value and min(query, value) >= 128 else None


def _flash_has(needs: AttentionNeeds, capability: Capability) -> bool:
    """Return True if FlashAttention 2 has this attention in Transformer Engine: heads of one size, no sinks."""
    if capability < (8, 0) or needs.sinks or needs.query_size != needs.value_size or needs.query_size % 8:
        return False
    return needs.query_size <= 192 or (needs.query_size <= 256 and capability in ((8, 0), (9, 0), (10, 0), (12, 0)))
