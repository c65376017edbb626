"""Detection of a machine's platform and of the devices that torch sees, without importing torch in this process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl import platform
from megarl.commands.doctor.finding import Finding, Needs, warning
from megarl.commands.doctor.machine import Machine, cached_per_machine
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS, kind_of

BUSY_SHARE = 0.1  # share of a device's memory in use; the driver alone uses up to 5 %
_TORCH_SECONDS = 60.0

# Runs in a child process: importing torch may crash if a driver is broken.
_ASK_TORCH = (
    'import json, torch; from megarl.commands.doctor.platform_detection import seen; print("\\n" + json.dumps(seen()))'
)


@dataclass(frozen=True)
class Chosen:
    """The selected kind of device, and the reason as text."""

    kind: DeviceKind
    why: str


@dataclass(frozen=True)
class TorchSees:
    """Devices that torch sees. `error` is the reason if torch could not be asked, else ""."""

    error: str = ""
    late: bool = False  # torch could not be asked, because its import did not end in time
    kind: str = "cpu"
    names: tuple[str, ...] = ()
    version: str = ""
    cuda: str | None = None  # CUDA version of this torch build
    capability: tuple[int, int] | None = None  # compute capability of the first GPU


def seen() -> dict[str, Any]:
    """Return the devices that torch sees, of the kind that `megarl.platform.select` chooses. Imports torch."""
    import torch

    kind = kind_of(platform.kind())
    if kind.package:
        importlib.import_module(kind.package)
    api: Any = getattr(torch, kind.torch_api) if kind.torch_api else None
    names = [api.get_device_name(number) for number in range(api.device_count())] if api else []
    capability = torch.cuda.get_device_capability(0) if names and api is torch.cuda and torch.version.cuda else None
    return {
        "kind": kind.name,
        "names": names,
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": capability,
    }


@cached_per_machine
def torch_sees(machine: Machine) -> TorchSees:
    """Run `seen` on `machine`, in a child process."""
    output = machine.python_code(_ASK_TORCH, _TORCH_SECONDS)
    if not output.good:
        return TorchSees(error=output.last_error, late=output.late)
    answer = json.loads(output.text.strip().splitlines()[-1])
    capability = answer["capability"] and tuple(answer["capability"])
    return TorchSees("", False, answer["kind"], tuple(answer["names"]), answer["version"], answer["cuda"], capability)


def platform_of(machine: Machine, needs: Needs) -> Chosen:
    """Return the kind of device that `megarl.platform.select` would choose."""
    if needs.device != "auto":
        return Chosen(kind_of(needs.device), f"cluster.device is {needs.device}")
    for kind in KINDS:
        if kind.distribution and machine.version(kind.distribution) is not None:
            return Chosen(kind, kind.present)
    if machine.version("torch") is None:
        return Chosen(by_files(machine), "torch is not installed; chosen by the files in /dev")
    detected = kind_of(torch_sees(machine).kind)
    return Chosen(detected, detected.present or ", ".join(kind.absent for kind in KINDS if kind.absent))


def by_files(machine: Machine) -> DeviceKind:
    """Return the first kind, in order of preference, with device files in /dev; else the kind without device files."""
    return next(kind for kind in KINDS if not kind.files or machine.glob(kind.files))


def busy(memory: dict[str, tuple[float, float]]) -> Iterator[Finding]:
    """Warn about devices with memory in use. `memory`: device number -> (MiB used, MiB in total)."""
    in_use = [
        f"{number} ({used / 1024:.0f} of {total / 1024:.0f} GiB)"
        for number, (used, total) in memory.items()
        if total and used > BUSY_SHARE * total
    ]
    if in_use:
        shows = ", ".join(kind.status_command for kind in KINDS if kind.status_command)
        yield warning(
            f"other processes use the memory of devices {', '.join(in_use)}",
            f"engines size their cache by free memory: end these processes ({shows}), or leave the devices out",
        )
