"""Options of `plan`: their consistency, and the device that they select."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megarl.errors import InputError, pluralize
from megarl.platform.device_table import HOST_MEMORY_OF, Device, device_named, device_of_machine, devices
from megarl.recipe.text import hardware_of

SECONDS = 120.0


@dataclass(frozen=True)
class PlanOptions:
    """Options as given on the command line; None or False: not given."""

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

    def arguments(self) -> list[str]:
        """Return the options that say for which devices a plan is, as arguments of another `plan`."""
        names = ("--device", "--devices", "--memory", "--host-memory", "--calibration", "--response")
        values = ((name, getattr(self, _field(name))) for name in names)
        given = [
            text
            for name, value in values
            if value is not None
            for text in (name, f"{value:g}" if isinstance(value, float) else str(value))
        ]
        return [*given, "--strict"] if self.strict else given

    def check(self) -> None:
        """Raise InputError for options that contradict each other or have no effect."""
        for flag, size, owner in (("--memory", self.memory, "device"), ("--host-memory", self.host_memory, "machine")):
            if size is not None and not size > 0:
                raise InputError(f"{flag} {size:g}: a {owner} has more than 0 GiB.")
        if self.calibrate is not None:
            for name in ("--search", "--html", "--json", "--response", "--calibration"):
                if self._has(name):
                    raise InputError(
                        f"{name} {_MEANINGS[name]}; --calibrate fits a device to a run. Leave one of them out."
                    )
        if self.search and self.html is not None:
            raise InputError(
                f"--html {_MEANINGS['--html']}; --search prints layouts, --json all of them. Leave one of them out."
            )
        for name, owner, is_present in (
            ("--out", "--calibrate RUN", self.calibrate),
            ("--seconds", "--search", self.search),
        ):
            if self._has(name) and not is_present:
                raise InputError(f"{name} {_MEANINGS[name]}. Give {owner} as well, or leave {name} out.")

    def check_with(self, device: Device | None) -> None:
        """Raise InputError for an option that needs a device if there is none."""
        if device is None:
            for name in ("--devices", "--response", "--calibration", "--host-memory"):
                if self._has(name):
                    raise InputError(
                        f"{name} {_MEANINGS[name]}, but no device is known: the recipe's head names no machine. Give --device as well."
                    )

    def _has(self, flag: str) -> bool:
        """Return True if the option was given."""
        value = getattr(self, _field(flag))
        return value is not None and value is not False


def _field(flag: str) -> str:
    return "as_json" if flag == "--json" else flag.removeprefix("--").replace("-", "_")


_MEANINGS = {
    "--html": "writes the page of a plan",
    "--json": "prints a plan or the result of a search",
    "--response": "sets the mean response length of an estimate, which needs a device",
    "--search": "searches for layouts",
    "--out": "writes the calibration that --calibrate fits",
    "--seconds": "limits the time of --search",
    "--host-memory": "sets the host memory of a device's machines",
    "--calibration": "has measured rates and factors of a device",
    "--devices": "has data sheets of devices",
}


def device_of(path: Path, name: str | None, table: Path | None) -> tuple[Device | None, list[str]]:
    """Return the device called `name`, else the device in the recipe's head, with notes on the choice.

    The head's number of devices per machine is used, unless `table` (a file of devices) has one for this device.
    """
    all_devices = devices(table)  # reports faults in the file even if it is not used
    machine = hardware_of(path)
    head_device = device_of_machine(machine[0]) if machine is not None else None
    if name is None and head_device is None:
        return None, []
    device = device_named(name or str(head_device), table)
    of_table = [entry for entry in all_devices if all_devices[entry] != devices().get(entry)]
    unused = [f"{table} is not used: the plan is for {device.name}; --device selects another."] if table else []
    where = "the table of devices has it"
    if device.name in of_table:
        unused, where = [], f"{table} says"
    if machine is None or head_device is None or device.name != head_device:
        return device, [f"{device.name}: {pluralize(device.per_node, 'device')} a machine, as {where}.", *unused]
    if all_devices[head_device].per_node != devices()[head_device].per_node:
        return device, [f"{device.name}: {pluralize(device.per_node, 'device')} a machine, as {table} says."]
    memory = device.host_memory if head_device in of_table else HOST_MEMORY_OF.get(machine[0], device.host_memory)
    return replace(device, per_node=machine[2], host_memory=memory), [
        f"{head_device}: {pluralize(machine[2], 'device')} a machine, as the recipe's head says.",
        *unused,
    ]


def host_memory_notes(device: Device, options: PlanOptions) -> list[str]:
    """Return a note with the source of the device's host memory; [] for a CPU, which has no other memory."""
    if device.name == "CPU":
        return []
    packaged = devices().get(device.name)
    source = "assumed: --host-memory or --devices FILE sets it"
    if options.host_memory is not None:
        source = "as --host-memory says"
    elif options.devices is not None and (
        packaged is None or devices(options.devices)[device.name].host_memory != packaged.host_memory
    ):
        source = f"as {options.devices} says"
    return [f"Host memory: {device.host_memory:g} GiB a machine, {source}."]
