"""What kinds of devices can do, as far as plans and MFU need it: a table in devices.yaml, to which a user's own file adds.

A file is a mapping from names to fields of `Device`. With `like: NAME` an entry says only where it differs from another,
of the same file or of megarl's table; an entry of a name that is there already takes its place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.config.errors import InputError
from megarl.registry import nearest


@dataclass(frozen=True)
class Device:
    """One device as torch sees it, of an Ascend 910C one of its two dies. Rates are those of data sheets; the shares say
    how much of them phases reach, and are what `plan --calibrate` fits."""

    name: str
    source: str  # where the figures are from
    memory: float  # GiB
    flops: float  # dense bf16, FLOP/s
    bandwidth: float  # of its memory, bytes/s
    link: float  # to another device of the node, one direction, bytes/s
    network: float  # to another node, one direction, bytes/s of a device
    host_link: float  # to the host's memory, one direction, bytes/s
    per_node: int
    host_memory: float  # GiB of the node
    train_share: float  # of flops: forward and backward passes of trainers
    prefill_share: float  # of flops: engines reading prompts
    decode_share: float  # of bandwidth: engines writing
    link_share: float  # of link, network and host_link
    layer_seconds: float  # that a layer takes at least, however few tokens there are: its kernels are started
    torch: tuple[str, ...] = ()  # words of the name that torch has for it
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Phases, as in timing_s/..., -> how many times as long they took as is estimated from rates and shares."""


_FIELDS = [one.name for one in fields(Device) if one.name != "name"]
_NEEDED = [one.name for one in fields(Device) if one.default is MISSING and one.default_factory is MISSING]
_SHARES = ("train_share", "prefill_share", "decode_share", "link_share")


def devices(own: Path | None = None) -> dict[str, Device]:
    """The table by name, with those of `own` (YAML) added. Raises InputError for a file that is no such table."""
    table = _packaged()
    if own is None:
        return table
    entries = _Entries(own, _read(own), table)
    return {**table, **{name: entries.device(name) for name in entries.given}}


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


def as_entry(device: Device) -> dict[str, Any]:
    """What a file says for `device` to be read from it: where it differs from megarl's own of that name, else all."""
    own = _packaged().get(device.name)
    like = {} if own is None else {"like": device.name}
    below = None if own is None else replace(own, torch=())  # which `like` leaves out
    fields = {key: getattr(device, key) for key in _FIELDS}
    differ = {key: value for key, value in fields.items() if below is None or value != getattr(below, key)}
    plain = {"torch": list(device.torch), "factors": dict(device.factors)}
    return like | {key: plain.get(key, value) for key, value in differ.items()}


def peak_flops(torch_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name that torch has for it; None for one that is not in the table.

    "NVIDIA H100 PCIe" has the words of two: the longest counts.
    """
    known = [(word, device) for device in devices().values() for word in device.torch]
    found = [pair for pair in known if re.search(rf"\b{re.escape(pair[0])}\b", torch_name)]
    return max(found, key=lambda pair: len(pair[0]))[1].flops if found else None


@functools.cache
def _packaged() -> dict[str, Device]:
    path = Path(__file__).with_name("devices.yaml")
    entries = _Entries(path, _read(path), {})
    return {name: entries.device(name) for name in entries.given}


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
    """Of one file. `known`: the table that it adds to."""

    def __init__(self, path: Path, given: dict[str, dict[str, Any]], known: Mapping[str, Device]):
        self.path, self.given, self.known = path, given, known

    def device(self, name: str) -> Device:
        found = self._fields(name, [])
        missing = [key for key in _NEEDED if key not in found and key != "name"]
        if missing:
            raise InputError(
                f"{self.path}: {name} lacks {', '.join(missing)}. Give them, or `like: NAME` of a device that has them."
            )
        return Device(name=name, **{key: self._value(name, key, value) for key, value in found.items()})

    def _fields(self, name: str, asked: list[str]) -> dict[str, Any]:
        entry = dict(self.given[name])
        base = entry.pop("like", None)
        for key in entry:
            if key not in _FIELDS:
                near = nearest(key, [*_FIELDS, "like"])
                raise InputError(
                    f"{self.path}: {name} has no field {key!r}."
                    + (f" Nearest: {near}." if near else f" There are {', '.join(_FIELDS)}.")
                )
        if base is None:
            return entry
        base = str(base)
        if base in self.given and base != name:
            if base in asked:
                raise InputError(
                    f"{self.path}: {' is like '.join([*asked[asked.index(base) :], name, base])}, in a ring."
                )
            below = self._fields(base, [*asked, name])
        elif base in self.known:
            device = self.known[base]
            below = {key: getattr(device, key) for key in _FIELDS}
        else:
            near = nearest(base, [*self.given, *self.known])
            hint = f" Nearest: {near}." if near else ""
            raise InputError(f"{self.path}: {name} is like {base}, which is not known.{hint}")
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
            if not isinstance(value, Mapping):
                raise InputError(f"{self.path}: {name}.factors is {value!r}. Give a mapping from phases to numbers.")
            return {str(phase): self._number(name, f"factors.{phase}", factor) for phase, factor in value.items()}
        number = self._number(name, key, value)
        if key in _SHARES and number > 1:
            raise InputError(f"{self.path}: {name}.{key} is {value!r}, a share of a rate: at most 1.")
        if key == "per_node" and number != int(number):
            raise InputError(f"{self.path}: {name}.per_node is {value!r}. Give a whole number.")
        return int(number) if key == "per_node" else number

    def _number(self, name: str, key: str, value: Any) -> float:
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not 0 < number < float("inf"):
            raise InputError(f"{self.path}: {name}.{key} is {value!r}. Give a number above 0.")
        return number
