"""Types for sets of compatible package versions, and comparisons with the installed versions.

The sets of a device kind are in `DeviceKind.sets` (cpu_kind.py, cuda_kind.py, npu_kind.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from megarl.errors import NotHereError


@dataclass(frozen=True)
class VersionSet:
    """A set of compatible versions.

    packages: PEP 440 specifier by distribution; "" allows any version. python: minor versions. system: versions of software
    that is not a Python package.
    """

    name: str
    device: str  # value of cluster.device
    python: tuple[str, ...]
    packages: dict[str, str] = field(default_factory=dict)
    system: dict[str, str] = field(default_factory=dict)
    install: str = ""  # command or description of the installation
    remark: str = ""


@dataclass(frozen=True)
class BuiltAgainst:
    """`package` is built against `other`: the first `numbers` of their versions must be equal. `why`: the consequence."""

    package: str
    other: str
    numbers: int
    why: str


@dataclass(frozen=True)
class Displaced:
    """`wrong` must not be installed together with `right`, for the reason `why`."""

    wrong: str
    right: str
    why: str


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def meets(version: str | None, specifier: str) -> bool:
    """Return True if a version meets a PEP 440 specifier; False for None and invalid versions."""
    try:
        return version is not None and SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def cuda_builds(
    version: Callable[[str], str | None] = version_of, architecture: str = platform.machine()
) -> dict[str, str]:
    """Return the problem of each package that was built for CUDA, if the installed torch was built for CPUs.

    transformers and vLLM import these packages wherever they are installed, and then cannot be imported themselves. pip and uv
    take CUDA builds from PyPI, on x86_64. version: returns the version of a distribution, as `version_of`.
    """
    torch = version("torch") or ""
    if not torch.endswith("+cpu") or architecture != "x86_64":
        return {}
    installed = {name: version(name) or "" for name in ("torchvision", "torchaudio", "torchcodec")}
    return {
        name: f"{name} {number} is a CUDA build, torch {torch} is for CPUs: `import vllm` fails"
        for name, number in installed.items()
        if number and "+cpu" not in number
    }


def cuda_builds_remedy(names: Iterable[str]) -> str:
    """Return how to remove the packages of `cuda_builds` from the environment of this Python.

    Environments of `uv tool` and `uv venv` have no pip, and a shell's `pip` may be that of another environment.
    """
    program = f"{shlex.quote(sys.executable)} -m pip uninstall -y"
    if importlib.util.find_spec("pip") is None:
        program = f"uv pip uninstall --python {shlex.quote(sys.executable)}"
    return f"{program} {' '.join(names)}, or install their +cpu builds from PyTorch's index for CPU wheels"


def refuse_cuda_builds() -> None:
    """Raise NotHereError if packages of `cuda_builds` are installed: commands that import vLLM or the trainer would fail.

    Not with torch-npu, which also needs a torch for CPUs.
    """
    if version_of("torch-npu") is None and (builds := cuda_builds()):
        raise NotHereError("cluster.device", "; ".join(builds.values()), cuda_builds_remedy(builds), value="cpu")
