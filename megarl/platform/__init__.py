"""Device kinds (CPU, CUDA, Ascend) and the patches that Megatron needs on them. Imports torch only in `select`."""

from __future__ import annotations

from megarl.platform.base import Platform
from megarl.platform.kinds import KINDS, kind_of

__all__ = ["Platform", "kind", "select"]


def kind(device: str = "auto") -> str:
    """Resolve `device` (recipe key `cluster.device`) to the name of a device kind.

    auto resolves to the first of `kinds.KINDS` that is available (`DeviceKind.is_here`); the CPU always is. Other names
    are returned unchecked.
    """
    return next(candidate.name for candidate in KINDS if candidate.is_here()) if device == "auto" else device


def select(device: str = "auto") -> Platform:
    """Return the platform for `device`: "auto", or the name of one of `kinds.KINDS`.

    Raises ValueError for an unknown name and for a device kind that is not available here.
    """
    chosen = kind_of(kind(device))
    if device != "auto" and not chosen.is_here():
        raise ValueError(
            f"cluster.device is {device}, but {chosen.absent} in this environment on this machine. "
            f"{chosen.install[0].upper()}{chosen.install[1:]}, or set cluster.device: cpu."
        )
    return chosen.platform()
