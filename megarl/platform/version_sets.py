"""Versions of packages that go together, and which of several sets a machine is nearest to."""

from __future__ import annotations

from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion


@dataclass(frozen=True)
class VersionSet:
    """Packages by the name of their distribution, each with a specifier (PEP 440) that its version must meet; an empty
    one where any will do. `python`: minor versions. `system`: versions of what is no Python package, by its name."""

    name: str
    device: str  # a value of cluster.device
    python: tuple[str, ...]
    packages: dict[str, str] = field(default_factory=dict)
    system: dict[str, str] = field(default_factory=dict)
    install: str = ""  # how one gets it: a command, or words
    remark: str = ""


@dataclass(frozen=True)
class BuiltAgainst:
    """`package` is built against `other`: the first `numbers` of their versions must be equal; `why`: what if not."""

    package: str
    other: str
    numbers: int
    why: str


@dataclass(frozen=True)
class Displaced:
    """`wrong` must not be installed beside `right`; `why`."""

    wrong: str
    right: str
    why: str


def meets(version: str | None, wanted: str) -> bool:
    """Whether an installed version is what a specifier wants; False for none, and for one that is no version."""
    try:
        return version is not None and SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidVersion:
        return False
