"""The set of versions that a machine is nearest to."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.commands.doctor.machine import Machine
from megarl.platform.version_sets import VersionSet, meets


def nearest_set(machine: Machine, sets: Iterable[VersionSet]) -> VersionSet:
    """Of `sets` the one that most of the installed versions are of; the first where none is."""

    def met(one: VersionSet) -> int:
        return sum(meets(machine.version(name), wanted) for name, wanted in one.packages.items() if wanted)

    return max(sets, key=met)
