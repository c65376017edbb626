"""The installed Transformer Engine: its version, and whether Megatron takes it. One place for run, recipe checks and doctor."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable

from packaging.version import InvalidVersion, Version

from megarl.platform.version_sets import meets

WANTED = ">=2.9,<2.12"
"""Versions that megatron-core 0.16.1 asks for: its metadata, extra `dev`."""

PARTS = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
"""Its distributions. The first names the version of the whole."""


def _version_here(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(version_of: Callable[[str], str | None] = _version_here) -> dict[str, str]:
    """Versions of the installed parts, by distribution. `version_of`: the lookup of another machine than this one."""
    return {name: version for name in PARTS if (version := version_of(name))}


def is_importable() -> bool:
    """Return whether this environment has the package `transformer_engine`."""
    return importlib.util.find_spec("transformer_engine") is not None


def version_of_whole() -> str | None:
    """Version of the Transformer Engine that this environment imports; None without one. Builds from source may have the CUDA
    part's distribution alone."""
    return next(iter(installed().values()), None) if is_importable() else None


def is_at_least(version: str | None, since: str) -> bool:
    """Return whether `version` is `since` or later; False for None, and for a text that is no version."""
    try:
        return version is not None and Version(version) >= Version(since)
    except InvalidVersion:
        return False


def problem_of(version: str) -> str | None:
    """A sentence for a version that megatron-core does not ask for; None for one that it does."""
    if meets(version, WANTED):
        return None
    return f"transformer-engine {version} is outside of {WANTED}, which megatron-core 0.16.1 asks for: untested"
