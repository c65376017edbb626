"""Checks of the platform and its devices: in /dev and visible to torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.platform_detection import TorchSees, platform_of, torch_sees
from megarl.errors import pluralize
from megarl.platform.kinds import KINDS


@check(
    "platform",
    f"which of {', '.join(kind.name for kind in KINDS)} megarl selects, and why; devices in /dev that would stay idle",
    seconds=70,
)
def platform(machine: Machine, needs: Needs) -> Iterator[Finding]:
    chosen = platform_of(machine, needs)
    kind, why = chosen.kind, chosen.why
    sees = torch_sees(machine) if machine.version("torch") else TorchSees()
    if sees.error:
        late = "run the doctor again: torch's files are read for the first time, or the machine is busy"
        remedy = late if sees.late else kind.import_remedy
        yield fail(f"{kind.name}, and `import torch` fails: {sees.error}", remedy)
        return
    present = [(other, machine.glob(other.files)) for other in KINDS if other.files and other is not kind]
    idle = [f"{len(files)} of {other.files}" for other, files in present if files]
    if needs.device != "auto" and kind.absent and sees.kind != kind.name:
        remedy = f"{kind.install}, or set cluster.device=auto"
        if kind.files and not machine.glob(kind.files):
            remedy = (
                f"this machine has no {kind.files}: run the recipe on a machine that has (in a container, pass the devices in: "
                f"{kind.pass_in}), and {kind.install} there; here only `megarl plan` and `megarl rehearse` work"
            )
        yield fail(f"{why}, and {kind.absent}", remedy)
    elif idle and needs.device == "auto":
        remedy = ", or ".join(other.install for other, files in present if files)
        remedy += f"; to use {kind.name}, set cluster.device={kind.name}"
        yield warning(f"{kind.name} ({why}), with {' and '.join(idle)} left idle", remedy)
    else:
        yield ok(f"{kind.name}: {why}")


@check("devices", "number of devices; *_VISIBLE_DEVICES names existing devices", seconds=70)
def devices(machine: Machine, needs: Needs) -> Iterator[Finding]:
    kind = platform_of(machine, needs).kind
    if not kind.files:
        yield ok(
            pluralize(machine.cores(), "CPU core")
            + (f" for {pluralize(needs.processes, 'process', 'processes')}" if needs.processes else "")
        )
        return
    sees, variable = torch_sees(machine), kind.visible
    if sees.error:
        yield fail(f"torch cannot count the devices: {sees.error}", "see the line `platform`")
        return
    if sees.kind != kind.name:  # the check `platform` reports it
        return
    files = machine.glob(kind.files)
    limit = machine.environ.get(variable)
    if not sees.names:
        setting = f"{variable}={limit!r}" if limit is not None else f"{variable} is not set"
        remedy = f"correct or unset {variable}; in a container, pass the devices in ({kind.pass_in})"
        yield fail(f"torch sees no device, /dev has {len(files)}, {setting}", remedy)
        return
    problem = _impossible(limit, len(files))
    if problem:
        yield fail(f"{variable}={limit}, {problem}", f"use device numbers from 0 to {len(files) - 1}, or unset it")
    else:
        hidden = f", of {len(files)} in /dev ({variable}={limit})" if limit is not None else ""
        yield ok(f"{len(sees.names)} x {sees.names[0]}{hidden}")


def _impossible(limit: str | None, present: int) -> str:
    """Return the problem with a list of device numbers, or "". Lists of device names (GPU-..., MIG-...) pass."""
    if limit is None or not present or not re.fullmatch(r"[\d,\s]+", limit):
        return ""
    numbers = [int(number) for number in limit.replace(" ", "").split(",") if number]
    if len(set(numbers)) < len(numbers):
        return "which names a device twice"
    absent = [number for number in numbers if number >= present]
    return f"and there are {present} devices" if absent else ""
