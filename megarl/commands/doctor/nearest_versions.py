"""Choice of the version set that fits a machine best."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.commands.doctor.machine import Machine
from megarl.platform.version_sets import VersionSet, meets


def nearest_set(machine: Machine, sets: Iterable[VersionSet]) -> VersionSet:
    """Return the set that the most installed packages belong to. With equal counts the first set wins."""

    def matches(versions: VersionSet) -> int:
        return sum(meets(machine.version(name), pin) for name, pin in versions.packages.items() if pin)

    return max(sets, key=matches)
