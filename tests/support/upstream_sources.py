"""Sources of other projects that tests read: wheels that launch/unpack_sources.py has unpacked (`launch/sources-dev.txt`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("MEGARL_SOURCES") or Path(sys.prefix, "sources"))
_MISSING = "is not unpacked: run `bash launch/install_cpu.sh dev` where the package index can be reached"


def unpacked(name: str, version: str) -> Path | None:
    """The folder with the packages of a wheel of sources-dev.txt; None: it could not be fetched."""
    place = FOLDER / f"{name}-{version}"
    return place if place.is_dir() else None


def torch_npu() -> Path | None:
    """The folder that holds the package torch_npu: MEGARL_TORCH_NPU, or the unpacked wheel."""
    named = os.environ.get("MEGARL_TORCH_NPU")
    return Path(named) if named else unpacked("torch-npu", "2.10.0.post4")


def missing(name: str) -> str:
    """The skip reason of tests that read the wheel `name`."""
    return f"{name} {_MISSING}"
