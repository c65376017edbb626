"""Devices, and what must be patched before Megatron is imported. Imports no torch by itself."""

from __future__ import annotations

from megarl.platform.base import Platform
from megarl.platform.kinds import KINDS, kind_of

__all__ = ["Platform", "kind", "select"]


def kind(device: str = "auto") -> str:
    """The kind of device that `select` takes for `device` (recipe key `cluster.device`), whether it is here or not.

    auto takes the first of `kinds.KINDS` that is here: of those that torch needs a package for, where it is installed,
    else where torch says that there are such devices; the CPU always is.
    """
    return next(one.name for one in KINDS if one.is_here()) if device == "auto" else device


def select(device: str = "auto") -> Platform:
    """The platform for `device`: "auto", or the name of one of `kinds.KINDS`.

    Raises ValueError for a device that this machine does not have, and for an unknown name.
    """
    chosen = kind_of(kind(device))
    if device != "auto" and not chosen.is_here():
        raise ValueError(
            f"cluster.device is {device}, but {chosen.absent}, in this environment on this machine. "
            f"{chosen.install[0].upper()}{chosen.install[1:]}, or set cluster.device: cpu."
        )
    return chosen.platform()
