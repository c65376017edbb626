"""The platform, and its devices: those in /dev, those that torch sees."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.found import TorchSees, platform_of, torch_sees
from megarl.commands.doctor.machine import Machine
from megarl.platform.kinds import KINDS
from megarl.text import pluralize


@check(
    "platform",
    f"which of {', '.join(kind.name for kind in KINDS)} megarl takes, and why; devices in /dev that it would leave idle",
    seconds=70,
)
def platform(machine: Machine, needs: Needs) -> Iterator[Finding]:
    chosen = platform_of(machine, needs)
    kind, why = chosen.kind, chosen.why
    sees = torch_sees(machine) if machine.version("torch") else TorchSees()
    if sees.error:
        yield fail(f"{kind.name}, and `import torch` fails: {sees.error}", kind.import_remedy)
        return
    present = [(one, machine.glob(one.files)) for one in KINDS if one.files and one is not kind]
    idle = [f"{len(files)} of {one.files}" for one, files in present if files]
    if needs.device != "auto" and kind.absent and sees.kind != kind.name:
        yield fail(f"{why}, and {kind.absent}", f"{kind.install}, or set cluster.device=auto")
    elif idle and needs.device == "auto":
        remedy = ", or ".join(one.install for one, files in present if files)
        remedy += f"; if {kind.name} is meant, set cluster.device={kind.name}"
        yield warning(f"{kind.name} ({why}), with {' and '.join(idle)} left idle", remedy)
    else:
        yield ok(f"{kind.name}: {why}")


@check(
    "devices", "how many there are, which of them *_VISIBLE_DEVICES lets through, which are taken by others", seconds=70
)
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
        yield fail(f"torch cannot say how many: {sees.error}", "see the line on the platform")
        return
    if sees.kind != kind.name:  # the check above says it
        return
    files = machine.glob(kind.files)
    limit = machine.environ.get(variable)
    if not sees.names:
        said = f"{variable}={limit!r}" if limit is not None else f"{variable} is not set"
        remedy = f"correct or unset {variable}; in a container, pass the devices in ({kind.pass_in})"
        yield fail(f"torch sees none; {len(files)} are in /dev, {said}", remedy)
        return
    wrong = _impossible(limit, len(files))
    if wrong:
        yield fail(f"{variable}={limit}, {wrong}", f"name devices of 0 to {len(files) - 1}, or unset it")
    else:
        hidden = f", of {len(files)} in /dev ({variable}={limit})" if limit is not None else ""
        yield ok(f"{len(sees.names)} x {sees.names[0]}{hidden}")


def _impossible(limit: str | None, present: int) -> str:
    """What is wrong with a list of devices by number; "" with none, and with one by name (GPU-..., MIG-...)."""
    if limit is None or not present or not re.fullmatch(r"[\d,\s]+", limit):
        return ""
    numbers = [int(number) for number in limit.replace(" ", "").split(",") if number]
    if len(set(numbers)) < len(numbers):
        return "which names one of them twice"
    absent = [number for number in numbers if number >= present]
    return f"and there are {present} devices" if absent else ""
