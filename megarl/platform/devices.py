"""What kinds of devices can do, as far as plans and MFU need it: a table in devices.yaml, to which a user's own file adds.

A file is a mapping from names to fields of `Device`. With `like: NAME` an entry says only where it differs from another,
of the same file or of megarl's table; an entry of a name that is there already takes its place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import InputError
from megarl.registry import nearest


def _of(unit: str, about: str, **given: Any) -> Any:
    """A field in `unit`, with what docs/planner.md says about it."""
    return field(metadata={"unit": unit, "about": about}, **given)


@dataclass(frozen=True)
class Device:
    """One device as torch sees it, of an Ascend 910C one of its two dies. Rates are those of data sheets; the shares say
    how much of them phases reach, and are what `plan --calibrate` fits."""

    name: str
    source: str = _of("text", "where the figures are from")
    memory: float = _of("GiB", "of the device")
    flops: float = _of("FLOP/s", "peak in dense bfloat16")
    bandwidth: float = _of("bytes/s", "of the device's memory")
    link: float = _of("bytes/s", "to another device of the machine, in one direction")
    network: float = _of("bytes/s", "of one device to another machine, in one direction")
    host_link: float = _of("bytes/s", "to the host's memory, in one direction")
    per_node: int = _of("whole number", "devices of a machine")
    host_memory: float = _of("GiB", "of the machine's host, which all its devices share")
    train_share: float = _of("share of `flops`, to 1", "what trainers' forward and backward passes reach")
    prefill_share: float = _of("share of `flops`, to 1", "what engines reach as they read prompts")
    decode_share: float = _of("share of `bandwidth`, to 1", "what engines reach as they write")
    link_share: float = _of("share of links, to 1", "what is reached of `link`, `network` and `host_link`")
    layer_seconds: float = _of(
        "seconds", "that a layer takes at least, however few tokens there are: kernels are started"
    )
    host_network: float = _of(
        "bytes/s",
        "of the machine's host to another host, over the interface that gloo uses, in one direction; 12.5e9 (100 Gbit/s, "
        "assumed) if absent",
        default=12.5e9,
    )
    communicator: float = _of(
        "MiB", "of the device's memory that each used group of processes takes; 0 (not counted) if absent", default=0.0
    )
    context: float = _of(
        "GiB", "of the device's memory that each process on it takes by itself; 0 (not counted) if absent", default=0.0
    )
    graphs: float = _of("GiB", "of an engine's captured graphs; 0 (not counted) if absent", default=0.0)
    process_memory: float = _of(
        "GiB", "of host memory that a trainer's or engine's process takes by itself; 4 (assumed) if absent", default=4.0
    )
    offload_link: float | None = _of(
        "bytes/s", "as `host_link`, of trainers' offloading alone; `host_link` if absent", default=None
    )
    adam_bandwidth: float | None = _of(
        "bytes/s",
        "of the device's memory, reached by Adam's step; `decode_share` of `bandwidth` if absent",
        default=None,
    )
    torch: tuple[str, ...] = _of(
        "list of texts", "words of the name that torch has for it, by which a run finds the peak of MFU", default=()
    )
    factors: Mapping[str, float] = _of(
        "numbers by phase",
        "how many times as long a phase of `timing_s/...` takes as is estimated from rates and shares",
        default_factory=dict,
        hash=False,
    )

    @property
    def adam_rate(self) -> float:
        """Bytes/s that Adam's step reaches."""
        return self.adam_bandwidth or self.bandwidth * self.decode_share

    @property
    def offload_rate(self) -> float:
        """Bytes/s that offloading reaches."""
        return (self.offload_link or self.host_link) * self.link_share

    @property
    def kind(self) -> str:
        """As `cluster.device` says it, so far as the name that torch has for it tells."""
        return "npu" if any(word.startswith("Ascend") for word in self.torch) else "cuda"


@dataclass(frozen=True)
class FieldOfFile:
    """A key of an entry: `needed` unless `like` names a device that has it."""

    name: str
    unit: str
    needed: bool
    about: str


def fields_of_file() -> list[FieldOfFile]:
    """All that an entry may say, as docs/planner.md lists it."""
    found = [FieldOfFile(one.name, one.metadata["unit"], one.name in _NEEDED, one.metadata["about"]) for one in _FIELDS]
    like = FieldOfFile("like", "name", False, "a device that has all that the entry does not say, but for `torch`")
    return [like, *found]


_FIELDS = [one for one in fields(Device) if one.name != "name"]
_NAMES = [one.name for one in _FIELDS]
_NEEDED = [one.name for one in _FIELDS if one.default is MISSING and one.default_factory is MISSING]
_NOT_NEGATIVE = ("communicator", "context", "graphs")
_SHARES = ("train_share", "prefill_share", "decode_share", "link_share")


def devices(own: Path | None = None) -> dict[str, Device]:
    """The table by name, with those of `own` (YAML) added. Raises InputError for a file that is no such table."""
    table = _packaged()
    if own is None:
        return table
    return {**table, **_Entries(own, _read(own), table).devices()}


def device_named(name: str, own: Path | None = None) -> Device:
    """The device `name` of that table. Raises InputError for one that is not in it, with the nearest that is."""
    table = devices(own)
    by_lower = {known.lower(): device for known, device in table.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    near = nearest(name, table)
    hint = f" Nearest: {near}." if near else ""
    raise InputError(
        f"device {name} is not known; {', '.join(table)} are.{hint} A file with others, with `like` for what they share "
        "with one of these: --devices FILE."
    )


def device_of(torch_name: str) -> Device | None:
    """The entry for a device by the name that torch has for it; None for one that is not in the table.

    "NVIDIA H100 PCIe" has the words of two: the longest counts.
    """
    known = [(word, device) for device in devices().values() for word in device.torch]
    found = [pair for pair in known if re.search(rf"\b{re.escape(pair[0])}\b", torch_name)]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else None


def peak_flops(torch_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name that torch has for it; None for one that is not in the table."""
    device = device_of(torch_name)
    return None if device is None else device.flops


@functools.cache
def _packaged() -> dict[str, Device]:
    path = Path(__file__).with_name("devices.yaml")
    return _Entries(path, _read(path), {}).devices()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(entry, dict) for entry in given.values()):
        raise InputError(
            f"{path}: is not a table of devices. Give a mapping, e.g.\n  MyDevice: {{like: H100, memory: 96}}"
        )
    return {str(name): {str(key): value for key, value in entry.items()} for name, entry in given.items()}


class _Entries:
    """Of one file. `known`: the table that it adds to. What is wrong is noted, and said all together."""

    def __init__(self, path: Path, given: dict[str, dict[str, Any]], known: Mapping[str, Device]):
        self.path, self.given, self.known = path, given, known
        self._wrong: dict[str, None] = {}  # once each, in order
        self._checked = {name: self._own(name) for name in given}

    def devices(self) -> dict[str, Device]:
        """Raises InputError with all that is wrong in the file."""
        found = {name: self._fields(name, []) for name in self.given}
        for name, of_name in found.items():
            missing = [key for key in _NEEDED if of_name is not None and key not in of_name]
            if missing:
                self._note(f"{name} lacks {', '.join(missing)}. Give them, or `like: NAME` of a device that has them.")
        if self._wrong:
            raise InputError(f"{self.path}: " + "\n  ".join(self._wrong))
        return {name: Device(name=name, **of_name) for name, of_name in found.items() if of_name is not None}

    def _note(self, wrong: str) -> None:
        self._wrong[wrong] = None

    def _own(self, name: str) -> dict[str, Any]:
        """What the entry itself says, in the types of the fields; of what is noted as wrong whatever was given."""
        found = {}
        for key, value in self.given[name].items():
            if key in _NAMES:
                found[key] = self._value(name, key, value)
            elif key != "like":
                near = nearest(key, [*_NAMES, "like"])
                hint = f"Nearest: {near}." if near else f"There are like, {', '.join(_NAMES)}."
                self._note(f"{name} has no field {key!r}. {hint}")
        return found

    def _fields(self, name: str, asked: list[str]) -> dict[str, Any] | None:
        """With those of the device that it is like; None where it is like none that there is, which is noted."""
        entry, base = self._checked[name], self.given[name].get("like")
        if base is None:
            return entry
        base = str(base)
        if base in self.given and base != name:
            if base in asked:
                ring = [*asked[asked.index(base) :], name]
                first = ring.index(min(ring))  # the same words from whichever of them one comes
                self._note(f"{' is like '.join([*ring[first:], *ring[:first], ring[first]])}, in a ring.")
                return None
            below = self._fields(base, [*asked, name])
            if below is None:
                return None
        elif base in self.known:
            below = {key: getattr(self.known[base], key) for key in _NAMES}
        else:
            near = nearest(base, [*self.given, *self.known])
            self._note(f"{name} is like {base}, which is not known." + (f" Nearest: {near}." if near else ""))
            return None
        below = {key: value for key, value in below.items() if key != "torch"}  # whose name it is not
        if "source" not in entry and self.known:
            below["source"] = f"{self.path.name}; the rest as {base}: {below.get('source', self.path.name)}"
        return {**below, **entry}

    def _value(self, name: str, key: str, value: Any) -> Any:
        """`value` in the type of the field. Numbers like 1e12, which YAML takes for text, are numbers here."""
        if key == "source":
            return str(value)
        if key == "torch":
            return tuple(str(word) for word in ([value] if isinstance(value, str) else value or []))
        if key == "factors":
            if isinstance(value, Mapping):
                return {str(phase): self._number(name, f"factors.{phase}", factor) for phase, factor in value.items()}
            self._note(f"{name}.factors is {value!r}. Give a mapping from phases to numbers.")
            return value
        if key in _NOT_NEGATIVE and value == 0 and not isinstance(value, bool):
            return 0.0
        number = self._number(name, key, value)
        if number is None:
            return value
        if key in _SHARES and number > 1:
            self._note(f"{name}.{key} is {value!r}, a share of a rate: at most 1.")
        if key == "per_node" and number != int(number):
            self._note(f"{name}.per_node is {value!r}. Give a whole number.")
        return int(number) if key == "per_node" else number

    def _number(self, name: str, key: str, value: Any) -> float | None:
        """None: it is none above 0, which is noted."""
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if 0 < number < float("inf"):
            return number
        self._note(f"{name}.{key} is {value!r}. Give a number above 0.")
        return None
