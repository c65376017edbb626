"""What the command `plan` is asked for: options that go together, and the device that they name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megarl.errors import InputError
from megarl.platform.devices import DEVICES_OF, HOST_MEMORY_OF, Device, device_named, devices
from megarl.recipe.header import hardware_of
from megarl.text import pluralize

SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """As they are given; None, or False: not."""

    memory: float | None = None
    html: Path | None = None
    out: Path | None = None
    calibrate: Path | None = None
    devices: Path | None = None
    response: float | None = None
    search: bool = False
    seconds: float | None = None
    as_json: bool = False
    calibration: Path | None = None
    host_memory: float | None = None
    device: str | None = None
    strict: bool = False

    def check(self) -> None:
        """InputError for an option that what is asked for would not read."""
        if self.memory is not None and not self.memory > 0:
            raise InputError(f"--memory {self.memory:g}: a device has more than 0 GiB.")
        if self.host_memory is not None and not self.host_memory > 0:
            raise InputError(f"--host-memory {self.host_memory:g}: a machine has more than 0 GiB.")
        given = {
            "--html": self.html is not None,
            "--response": self.response is not None,
            "--json": self.as_json,
            "--seconds": self.seconds is not None,
            "--out": self.out is not None,
            "--search": self.search,
            "--calibration": self.calibration is not None,
        }
        if self.calibrate is not None:
            for name in ("--search", "--html", "--json", "--response", "--calibration"):
                if given[name]:
                    raise InputError(
                        f"{name} {_WHAT[name]}; --calibrate fits a device to a run. Leave one of them out."
                    )
        if self.search and given["--html"]:
            raise InputError(
                f"--html {_WHAT['--html']}; --search prints layouts, --json all of them. Leave one of them out."
            )
        for name, owner, has in (("--out", "--calibrate RUN", self.calibrate), ("--seconds", "--search", self.search)):
            if given[name] and not has:
                raise InputError(f"{name} {_WHAT[name]}. Give {owner} as well, or leave {name} out.")

    def check_with(self, device: Device | None) -> None:
        """InputError for an option that is read where a device is known."""
        if device is None:
            for name, given in (
                ("--devices", self.devices),
                ("--response", self.response),
                ("--calibration", self.calibration),
                ("--host-memory", self.host_memory),
            ):
                if given is not None:
                    raise InputError(
                        f"{name} {_WHAT[name]}, and none is known: the recipe's head names no machine. Give --device as well."
                    )


_WHAT = {
    "--html": "writes the page of a recipe's plan",
    "--json": "prints a plan, or what a search found",
    "--response": "is the mean response that seconds are estimated for, of a device",
    "--search": "looks for layouts",
    "--out": "writes the calibration that --calibrate fits",
    "--seconds": "is how long --search looks",
    "--host-memory": "is that of the machines of a device",
    "--calibration": "has rates and factors of the device that seconds are estimated for",
    "--devices": "has the figures of the device that a plan is for",
}


def device_of(path: Path, name: str | None, table: Path | None) -> tuple[Device | None, list[str]]:
    """What `name` says, else the recipe's head, whose machine says how many of its devices it has; and what was decided
    of that. A device whose number `table` says has that number."""
    known = devices(table)  # read in any case: what is wrong with the user's is said
    machine = hardware_of(path)
    own = DEVICES_OF.get(machine[0]) if machine is not None else None
    if name is None and own is None:
        return None, []
    found = device_named(name or str(own), table)
    theirs = [one for one in known if known[one] != devices().get(one)]
    unused = [f"{table} is not used: the plan is for {found.name}; --device says another."] if table else []
    where = "the table of devices has it"
    if found.name in theirs:
        unused, where = [], f"{table} says"
    if machine is None or own is None or found.name != own:
        return found, [f"{found.name}: {pluralize(found.per_node, 'device')} a machine, as {where}.", *unused]
    if known[own].per_node != devices()[own].per_node:
        return found, [f"{found.name}: {pluralize(found.per_node, 'device')} a machine, as {table} says."]
    memory = found.host_memory if own in theirs else HOST_MEMORY_OF.get(machine[0], found.host_memory)
    return replace(found, per_node=machine[2], host_memory=memory), [
        f"{own}: {pluralize(machine[2], 'device')} a machine, as the recipe's head says.",
        *unused,
    ]
