"""All checks of a machine, in the order in which they run: a check that explains later failures comes first."""

from __future__ import annotations

import importlib

from megarl.commands.doctor import devices, network, packages, system
from megarl.commands.doctor.check import Check
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS


def checks_of(kind: DeviceKind) -> tuple[Check, ...]:
    """Return the checks that only this kind of device has."""
    return importlib.import_module(kind.checks).CHECKS if kind.checks else ()


CHECKS: list[Check] = [
    devices.platform,
    devices.devices,
    packages.python,
    packages.packages,
    packages.pairs,
    *(device_check for kind in reversed(KINDS) for device_check in checks_of(kind)),
    network.launch,
    network.ray_address,
    network.ports,
    network.interfaces,
    system.clocks,
    system.open_files,
    system.shared_memory,
    system.memory,
    system.run_directory,
    system.temporary_files,
    system.sandbox,
    system.hub,
    packages.imports,
]
