"""Version of the installed Transformer Engine and its compatibility with Megatron, for runs, recipe checks and doctor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from packaging.version import InvalidVersion, Version

from megarl.platform.version_sets import meets, version_of

WANTED = ">=2.9,<2.12"
"""Versions that megatron-core 0.16.1 requires, by the extra `dev` in its metadata."""

PARTS = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
"""Its distributions. The first has the version of Transformer Engine as a whole."""


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
