"""Which platform a machine would run on, and what torch sees there: for the doctor, without importing torch here."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl import platform
from megarl.commands.doctor.finding import Finding, Needs, warning
from megarl.commands.doctor.machine import Machine, once
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS, kind_of

BUSY_SHARE = 0.1  # of a device's memory; of an idle one up to 5 % are taken by its own software
_TORCH_SECONDS = 60.0

# In a process of its own: importing torch may crash where a driver is broken.
_ASK_TORCH = 'import json, torch; from megarl.commands.doctor.found import seen; print("\\n" + json.dumps(seen()))'


@dataclass(frozen=True)
class Chosen:
    """A kind of device, and why, in words."""

    kind: DeviceKind
    why: str


@dataclass(frozen=True)
class TorchSees:
    """`error`: why torch could not say; else what it found."""

    error: str = ""
    kind: str = "cpu"
    names: tuple[str, ...] = ()
    version: str = ""
    cuda: str | None = None  # that it was built for


def seen() -> dict[str, Any]:
    """What torch sees, of the kind that `megarl.platform.select` takes. Imports torch."""
    import torch

    kind = kind_of(platform.kind())
    if kind.package:
        importlib.import_module(kind.package)
    api = getattr(torch, kind.torch_api) if kind.torch_api else None
    names = [api.get_device_name(number) for number in range(api.device_count())] if api else []
    return {"kind": kind.name, "names": names, "version": torch.__version__, "cuda": torch.version.cuda}


@once
def torch_sees(machine: Machine) -> TorchSees:
    """As `seen`, on `machine`."""
    output = machine.python_code(_ASK_TORCH, _TORCH_SECONDS)
    if not output.good:
        return TorchSees(error=output.last_error)
    said = json.loads(output.text.strip().splitlines()[-1])
    return TorchSees("", said["kind"], tuple(said["names"]), said["version"], said["cuda"])


def platform_of(machine: Machine, needs: Needs) -> Chosen:
    """What megarl would run on: as `megarl.platform.select`."""
    if needs.device != "auto":
        return Chosen(kind_of(needs.device), f"cluster.device is {needs.device}")
    for kind in KINDS:
        if kind.distribution and machine.version(kind.distribution) is not None:
            return Chosen(kind, kind.present)
    if machine.version("torch") is None:
        return Chosen(by_files(machine), "torch is not installed; by the files in /dev")
    found = kind_of(torch_sees(machine).kind)
    return Chosen(found, found.present or ", ".join(kind.absent for kind in KINDS if kind.absent))


def by_files(machine: Machine) -> DeviceKind:
    """The kind whose devices lie in /dev, preferred ones first; that without such files where there is none."""
    return next(kind for kind in KINDS if not kind.files or machine.glob(kind.files))


def busy(memory: dict[str, tuple[float, float]]) -> Iterator[Finding]:
    """memory: MiB taken and in all, by the device's number."""
    taken = [
        f"{number} ({used / 1024:.0f} of {total / 1024:.0f} GiB)"
        for number, (used, total) in memory.items()
        if total and used > BUSY_SHARE * total
    ]
    if taken:
        shows = ", ".join(kind.status_command for kind in KINDS if kind.status_command)
        yield warning(
            f"memory of devices that somebody holds: {', '.join(taken)}",
            f"engines measure what is free when they load: end what runs there ({shows}), or leave these out",
        )
