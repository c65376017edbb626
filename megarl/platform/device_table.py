"""Memory, FLOP/s and bandwidths of devices, for plans and MFU: megarl's table devices.yaml and a user's file.

A file maps device names to fields of `Device`. With `like: NAME` an entry inherits the fields of another entry, of the same
file or of megarl's table. An entry of the user's file replaces megarl's entry with the same name.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import InputError
from megarl.registry import nearest

# Devices of the machines that recipe headers name (`# Hardware:`). GPU machines have the name of their device: SXM devices
# of NVIDIA's data sheets. https://www.hiascend.com/hardware: a device of an Atlas 800T A3 is one die of a 910C.
DEVICES_OF = {
    "Atlas 200T A2 Box16": "910B",
    "Atlas 800T A2": "910B",
    "Atlas 900 A2 PODc": "910B",
    "910B3": "910B",  # npu-smi's name for it
    "Atlas 800T A3": "910C",
    "A100": "A100",
    "H100": "H100",
    "H200": "H200",
}

# Host memory in GiB of machines that differ from their device's entry in devices.yaml. Assumed: 128 GiB per device.
HOST_MEMORY_OF = {"Atlas 200T A2 Box16": 2048.0}


# Devices of machines that differ from their device's `per_node` in devices.yaml.
PER_NODE_OF = {"Atlas 200T A2 Box16": 16}


def _of(unit: str, about: str, **options: Any) -> Any:
    """A dataclass field with its unit and its description in docs/planner.md. Without a default, a file must set it."""
    return field(metadata={"unit": unit, "about": about}, **options)


@dataclass(frozen=True)
class Device:
    """One device as torch counts devices (an Ascend 910C has two). Rates are from data sheets; shares are the fractions of
    them that phases reach, which `plan --calibrate` fits."""

    name: str
    source: str = _of("text", "where the figures are from")
    memory: float = _of("GiB", "of the device")
    flops: float = _of("FLOP/s", "peak in dense bfloat16")
    bandwidth: float = _of("bytes/s", "of the device's memory")
    link: float = _of("bytes/s", "of one device to all others of its machine, in one direction, over all its links")
    network: float = _of("bytes/s", "from one device to another machine, in one direction")
    host_link: float = _of("bytes/s", "to the host's memory, in one direction")
    per_node: int = _of("whole number", "devices per machine")
    host_memory: float = _of("GiB", "of the machine's host, shared by all its devices")
    train_share: float = _of("share of `flops`, to 1", "reached by trainers' forward and backward passes")
    prefill_share: float = _of("share of `flops`, to 1", "reached by engines in prefill")
    decode_share: float = _of("share of `bandwidth`, to 1", "reached by engines in decode")
    link_share: float = _of("share of links, to 1", "reached of `link`, `network` and `host_link`")
    layer_seconds: float = _of("seconds", "minimum time of a layer, even for few tokens: kernel launches")
    mesh: int = _of(
        "whole number",
        "devices of a full mesh, in which any two share one of the `mesh` - 1 links of a device; 0 (a switch: each pair can use "
        "all of `link`) if absent",
        default=0,
    )
    host_network: float = _of(
        "bytes/s",
        "from the machine's host to another host, over gloo's network interface, in one direction; 12.5e9 (100 Gbit/s, "
        "assumed) if absent",
        default=12.5e9,
    )
    communicator: float = _of("MiB", "of device memory per used process group; 0 (not counted) if absent", default=0.0)
    context: float = _of(
        "GiB", "of device memory per process, before any tensor; 0 (not counted) if absent", default=0.0
    )
    graphs: float = _of("GiB", "of an engine's captured graphs; 0 (not counted) if absent", default=0.0)
    process_memory: float = _of(
        "GiB", "of host memory per trainer or engine process, without tensors; 4 (assumed) if absent", default=4.0
    )
    offload_link: float | None = _of(
        "bytes/s", "like `host_link`, for trainers' offloading only; `host_link` if absent", default=None
    )
    adam_bandwidth: float | None = _of(
        "bytes/s",
        "of device memory, reached by Adam's step; `decode_share` of `bandwidth` if absent",
        default=None,
    )
    torch: tuple[str, ...] = _of(
        "list of texts", "words of torch's name for the device, by which a run finds the peak for MFU", default=()
    )
    factors: Mapping[str, float] = _of(
        "numbers by phase",
        "ratio of the measured to the estimated time of a phase of `timing_s/...`",
        default_factory=dict,
        hash=False,
    )

    @property
    def adam_rate(self) -> float:
        """Bytes/s of device memory that Adam's step reaches."""
        return self.adam_bandwidth or self.bandwidth * self.decode_share

    @property
    def offload_rate(self) -> float:
        """Bytes/s between device and host that offloading reaches."""
        return (self.offload_link or self.host_link) * self.link_share

    def mesh_of(self, index: int) -> int:
        """Return the number of the full mesh of the machine's device `index`; 0 behind a switch, which joins all."""
        return index // self.mesh if self.mesh else 0

    def link_rate(self, members: Iterable[int]) -> float:
        """Return the bytes/s of a device to a group in its machine. `members`: the group's indices in the machine.

        n devices of a full mesh use n - 1 of the `mesh` - 1 links of each. A machine's meshes are joined by `host_link`
        (PCIe), which limits groups over several meshes. A group of one device has no limit but `link`.
        """
        meshes = Counter(self.mesh_of(index) for index in members)
        rates = [self.link]
        if self.mesh:
            rates += [self.link * (count - 1) / (self.mesh - 1) for count in meshes.values() if count > 1]
        if len(meshes) > 1:
            rates.append(self.host_link)
        return min(rates)

    @property
    def kind(self) -> str:
        """Device kind as in `cluster.device`, derived from torch's name."""
        return "npu" if any(word.startswith("Ascend") for word in self.torch) else "cuda"


_FIELDS = [key for key in fields(Device) if key.name != "name"]
_NAMES = [key.name for key in _FIELDS]
_NEEDED = [key.name for key in _FIELDS if key.default is MISSING and key.default_factory is MISSING]
_NOT_NEGATIVE = ("communicator", "context", "graphs", "mesh")
_WHOLE = ("per_node", "mesh")
_SHARES = ("train_share", "prefill_share", "decode_share", "link_share")


def devices(user_file: Path | None = None) -> dict[str, Device]:
    """Devices by name: megarl's table, updated by `user_file` (YAML). Raises InputError for an invalid file."""
    table = _packaged()
    if user_file is None:
        return table
    return {**table, **_Entries(user_file, _read(user_file), table).devices()}


def device_of_machine(machine: str) -> str | None:
    """Return the device of a machine that a recipe's header names; a header may name a device of the table itself."""
    return DEVICES_OF.get(machine) or (machine if machine in _packaged() else None)


def generation_hint(name: str) -> str:
    """Return a sentence with the devices of an Atlas generation (A2, A3) that an unknown `name` contains, else ""."""
    generation = re.search(r"\bA[23]\b", name.upper())
    if generation is None:
        return ""
    base = {"A2": "910B", "A3": "910C"}[generation[0]]
    names = [device for device in _packaged() if device.startswith(base)]
    return f" Atlas {generation[0]} machines have {base} devices: name {', '.join(names[:-1])} or {names[-1]}; npu-smi info prints which."


def device_named(name: str, user_file: Path | None = None) -> Device:
    """Return the device `name` of `devices`, in any case. Raises InputError with the nearest name if it is unknown."""
    table = devices(user_file)
    by_lower = {key.lower(): device for key, device in table.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    near = nearest(name, table)
    hint = generation_hint(name) or (f" Nearest: {near}." if near else "")
    raise InputError(
        f"device {name} is unknown; known: {', '.join(table)}.{hint} Add devices with a file (plan: --devices, simulate: --device-file); `like` inherits fields "
        "of a known device."
    )


def device_of(torch_name: str) -> Device | None:
    """Return the device with a word of `torch` in torch's name for it; None if the table has none.

    "NVIDIA H100 PCIe" contains words of two entries: the longest word decides.
    """
    words = [(word, device) for device in devices().values() for word in device.torch]
    matches = [pair for pair in words if re.search(rf"\b{re.escape(pair[0])}\b", torch_name)]
    return max(matches, key=lambda pair: len(pair[0]))[1] if matches else None


def peak_flops(torch_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by torch's name for it; None if the table does not have it."""
    device = device_of(torch_name)
    return None if device is None else device.flops


@functools.cache
def _packaged() -> dict[str, Device]:
    path = Path(__file__).with_name("devices.yaml")
    return _Entries(path, _read(path), {}).devices()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise InputError(
            f"{path}: no such file. A YAML file of devices belongs here (docs/planner.md). --device selects a device of the "
            "table, and the recipe's line `# Hardware: H100, 2 x 8` the devices of a machine"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise InputError(
            f"{path}: is not a table of devices. Write a mapping, e.g.\n  MyDevice: {{like: H100, memory: 96}}"
        )
    return {str(name): {str(key): value for key, value in entry.items()} for name, entry in content.items()}


class _Entries:
    """Entries of one file. `table`: devices that `like` may refer to. Collects all problems of the file."""

    def __init__(self, path: Path, entries: dict[str, dict[str, Any]], table: Mapping[str, Device]):
        self.path, self.entries, self.table = path, entries, table
        self._problems: dict[str, None] = {}  # unique, in order
        self._checked = {name: self._check(name) for name in entries}

    def devices(self) -> dict[str, Device]:
        """Build the devices. Raises InputError with all problems of the file."""
        by_name = {name: self._inherit(name, []) for name in self.entries}
        for name, values in by_name.items():
            missing = [key for key in _NEEDED if values is not None and key not in values]
            if missing:
                self._note(f"{name} lacks {', '.join(missing)}. Add them, or `like: NAME` of a device that has them.")
        if self._problems:
            raise InputError(f"{self.path}: " + "\n  ".join(self._problems))
        return {name: Device(name=name, **values) for name, values in by_name.items() if values is not None}

    def _note(self, problem: str) -> None:
        self._problems[problem] = None

    def _check(self, name: str) -> dict[str, Any]:
        """Fields of an entry, converted to their types, without inherited ones. Notes problems."""
        values = {}
        for key, value in self.entries[name].items():
            if key in _NAMES:
                values[key] = self._value(name, key, value)
            elif key != "like":
                near = nearest(key, [*_NAMES, "like"])
                hint = f"Nearest: {near}." if near else f"There are like, {', '.join(_NAMES)}."
                self._note(f"{name} has no field {key!r}. {hint}")
        return values

    def _inherit(self, name: str, visited: list[str]) -> dict[str, Any] | None:
        """Fields of an entry, with those inherited through `like`. Notes a problem and returns None if `like` is wrong.

        visited: entries that inherit from this one, to detect a cycle.
        """
        entry, base = self._checked[name], self.entries[name].get("like")
        if base is None:
            return entry
        base = str(base)
        if base in self.entries and base != name:
            if base in visited:
                cycle = [*visited[visited.index(base) :], name]
                first = cycle.index(min(cycle))  # the same message from every entry of the cycle
                self._note(f"{' is like '.join([*cycle[first:], *cycle[:first], cycle[first]])}, which is a cycle.")
                return None
            inherited = self._inherit(base, [*visited, name])
            if inherited is None:
                return None
        elif base in self.table:
            inherited = {key: getattr(self.table[base], key) for key in _NAMES}
        else:
            near = nearest(base, [*self.entries, *self.table])
            self._note(f"{name} is like {base}, which is unknown." + (f" Nearest: {near}." if near else ""))
            return None
        inherited = {key: value for key, value in inherited.items() if key != "torch"}  # torch's name of the base
        if "source" not in entry and self.table:
            inherited["source"] = f"{self.path.name}; the rest as {base}: {inherited.get('source', self.path.name)}"
        return {**inherited, **entry}

    def _value(self, name: str, key: str, value: Any) -> Any:
        """Convert `value` to the type of the field. Numbers like 1e12, which YAML reads as text, become numbers."""
        if key == "source":
            return str(value)
        if key == "torch":
            return tuple(str(word) for word in ([value] if isinstance(value, str) else value or []))
        if key == "factors":
            if isinstance(value, Mapping):
                return {str(phase): self._number(name, f"factors.{phase}", factor) for phase, factor in value.items()}
            self._note(f"{name}.factors is {value!r}; it must be a mapping from phases to numbers.")
            return value
        if key in _NOT_NEGATIVE and value == 0 and not isinstance(value, bool):
            return 0 if key in _WHOLE else 0.0
        number = self._number(name, key, value)
        if number is None:
            return value
        if key in _SHARES and number > 1:
            self._note(f"{name}.{key} is {value!r}; a share must be at most 1.")
        if key not in _WHOLE:
            return number
        if number != int(number):
            self._note(f"{name}.{key} is {value!r}; it must be a whole number.")
        elif key == "mesh" and number < 2:
            self._note(f"{name}.mesh is {value!r}; it must be 0 (a switch), or the devices of a mesh: at least 2.")
        return int(number)

    def _number(self, name: str, key: str, value: Any) -> float | None:
        """Convert `value` to a positive number; notes a problem and returns None for any other value."""
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if 0 < number < float("inf"):
            return number
        self._note(f"{name}.{key} is {value!r}; it must be a number above 0.")
        return None
