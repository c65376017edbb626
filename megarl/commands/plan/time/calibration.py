"""Calibration files: measured rates and factors of a device, which `plan --calibration FILE` applies to estimates.

A file is YAML (`Calibration.to_yaml`, `read_calibration`):

    schema: 1
    device: 910C
    source: "acceptance on node-1, 2026-11-22"
    rates:
      train_flops: {value: 1.06e14, origin: measured, how: "Qwen3-8B, 8 layers, micro batches of 8,192 tokens"}
      host_link: {value: 2.7e10, origin: measured, how: "page-locked copy of 1 GiB, median of 20"}
    factors:
      gen: {value: 2.1, origin: measured, how: "steps 3 to 10 of runs/mine"}
    versions: {torch: 2.10.0}

All sections but `schema`, `device` and `source` may be absent. Rates are measured, not copied from a data sheet. A factor
is measured seconds / estimated seconds of a phase of `timing_s/...`, after the rates have been applied. Files of
earlier versions also have `observations`, and `low` and `high` of entries, which are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.atomic_files import write_atomically
from megarl.errors import InputError
from megarl.platform.device_table import Device
from megarl.registry import nearest

SCHEMA = 1
FORMER_PHASES = {"weight_exchange": "weight_sync"}  # names in calibrations and metrics of earlier versions of megarl
ORIGINS = ("measured", "fitted", "assumed")
"""Origin of an entry: measured directly, fitted to the phases of whole steps, or neither."""

RATES: dict[str, tuple[str, str]] = {
    "matmul_flops": (
        "FLOP/s",
        "large dense bfloat16 matrix products; an upper bound of train_flops and prefill_flops where these are absent",
    ),
    "train_flops": ("FLOP/s", "model FLOPs of a device in trainers' forward and backward passes"),
    "prefill_flops": ("FLOP/s", "model FLOPs of a device as engines read prompts"),
    "memory_bandwidth": (
        "bytes/s",
        "large copies on the device, read plus written; an upper bound of decode_bandwidth and adam_bandwidth where these "
        "are absent",
    ),
    "decode_bandwidth": ("bytes/s", "weights and KV cache that an engine's device reads as it decodes"),
    "adam_bandwidth": ("bytes/s", "read and written by the optimizer's step on the device"),
    "link": ("bytes/s", "of one device to all others of its machine, in one direction, over all its links"),
    "network": ("bytes/s", "of one device to another machine, in one direction"),
    "host_link": ("bytes/s", "between the device and page-locked host memory, in one direction, all devices at once"),
    "offload_link": ("bytes/s", "trainers' offloading to the host; host_link where it is absent"),
    "host_network": ("bytes/s", "of a machine's host to another host, over the interface that gloo uses"),
    "layer_seconds": ("seconds", "a decoder layer takes at least, however few tokens there are"),
}
"""Names in `rates`: (unit, meaning)."""


@dataclass(frozen=True)
class CalibrationEntry:
    """A rate or factor."""

    value: float
    origin: str  # one of ORIGINS
    how: str  # workload and repetitions; for `assumed`, the reason

    def plain(self) -> dict[str, Any]:
        """Return the entry as in a file."""
        return {"value": float(f"{self.value:.4g}"), "origin": self.origin, "how": self.how}


@dataclass(frozen=True)
class Calibration:
    """Measured rates (names of `RATES`) and factors (phases of `timing_s/...`) of one device."""

    device: str  # name in the table of devices
    source: str
    rates: Mapping[str, CalibrationEntry] = field(default_factory=dict)
    factors: Mapping[str, CalibrationEntry] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise InputError that lists every fault."""
        texts = {"device": self.device, "source": self.source}
        faults = [f"{name}: {fault}" for name, value in texts.items() if (fault := _text_fault(value))]
        for section, entries in (("rates", self.rates), ("factors", self.factors)):
            for name, entry in entries.items():
                faults += [f"{section}.{name}.{fault}" for fault in _faults(entry)]
        for name in self.rates:
            if name not in RATES:
                near = nearest(name, RATES)
                faults.append(f"rates has no {name!r}. " + (f"Nearest: {near}." if near else f"There are {_NAMES}."))
        if faults:
            raise InputError("a calibration is wrong:\n  " + "\n  ".join(faults))

    def apply(self, device: Device) -> Device:
        """Return `device` with these rates and factors. Raises InputError for another device.

        A share is the measured rate / the data sheet's rate, at most 1: a higher rate raises the data sheet's instead.
        Bounds (matmul_flops, memory_bandwidth) lower a share that was not measured, and never raise it. Factors replace
        the factors of `device`, since they were measured against these rates.
        """
        if device.name.lower() != self.device.lower():
            raise InputError(
                f"the calibration is for {self.device}, the plan for {device.name}. Give --device {self.device}, or a "
                "calibration for this device."
            )
        if device.mesh and "link" in self.rates and self.rates["link"].how.startswith("rank 0 to rank 1"):
            raise InputError(
                f"rates.link is {self.rates['link'].value:g} bytes/s between two devices, as earlier versions of megarl measured it, "
                f"but {device.name} has {device.mesh - 1} links to the others of its machine, and link is all of them: run "
                "`megarl accept` stage 7 again, or leave the entry out."
            )
        changed = device
        for bound, peak, shares in _BOUNDS:
            if bound in self.rates:
                most = self.rates[bound].value / getattr(device, peak)
                for share in shares:
                    changed = _with(changed, share, min(getattr(changed, share), most))
        for name, peak, share in SHARES:
            if name in self.rates:
                rate = self.rates[name].value
                if rate > getattr(changed, peak):
                    changed = _raised(changed, peak, rate)
                changed = _with(changed, share, rate / getattr(changed, peak))
        for name in LINKS:
            if name in self.rates:
                changed = _with(changed, name, self.rates[name].value / changed.link_share)
        for name in ("adam_bandwidth", "layer_seconds"):
            if name in self.rates:
                changed = _with(changed, name, self.rates[name].value)
        factors = {phase: entry.value for phase, entry in self.factors.items()}
        return replace(changed, factors=factors, source=f"{device.source}; calibrated: {self.source}")

    def to_yaml(self) -> str:
        """Return the text of the file."""
        plain: dict[str, Any] = {"schema": SCHEMA, "device": self.device, "source": self.source}
        plain["rates"] = {name: entry.plain() for name, entry in self.rates.items()}
        plain["factors"] = {name: entry.plain() for name, entry in self.factors.items()}
        plain["versions"] = dict(self.versions)
        return yaml.safe_dump(
            {key: value for key, value in plain.items() if value}, sort_keys=False, allow_unicode=True
        )

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_atomically(path, f"# `megarl plan RECIPE --calibration` reads this file.\n{self.to_yaml()}".encode())


def read_calibration(path: Path) -> Calibration:
    """Read a calibration from a YAML file. Raises InputError, with the path, for an invalid file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file. `megarl accept` writes DIR/7-speed/calibration.yaml.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not a calibration. `megarl plan --calibrate RUN --out FILE` writes one.")
    try:
        return _parsed(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _parsed(content: dict[Any, Any]) -> Calibration:
    if content.get("schema") != SCHEMA:
        raise InputError(f"schema is {content.get('schema')!r}; this version of megarl reads schema {SCHEMA}.")
    sections = ("schema", "device", "source", "rates", "factors", "versions")
    unknown = sorted(str(key) for key in content if key not in (*sections, "observations"))
    if unknown:
        raise InputError(f"has no section {', '.join(unknown)}. There are {', '.join(sections)}.")
    missing = [key for key in ("device", "source") if key not in content]
    if missing:
        raise InputError(f"lacks {', '.join(missing)}.")
    versions = _mapping(content, "versions")
    return Calibration(
        device=str(content["device"]),
        source=content["source"],
        rates={name: _entry("rates", name, value) for name, value in _mapping(content, "rates").items()},
        factors={
            FORMER_PHASES.get(name, name): _entry("factors", name, value)
            for name, value in _mapping(content, "factors").items()
        },
        versions={name: str(value) for name, value in versions.items()},
    )


def _mapping(content: dict[Any, Any], section: str) -> dict[str, Any]:
    value = content.get(section) or {}
    if not isinstance(value, dict):
        raise InputError(f"{section} is {value!r}. Give a mapping.")
    return {str(name): entry for name, entry in value.items()}


def _entry(section: str, name: str, value: Any) -> CalibrationEntry:
    keys = ("value", "origin", "how", "low", "high")
    if not isinstance(value, dict) or not set(value) <= set(keys) or not {"value", "origin", "how"} <= set(value):
        raise InputError(
            f"{section}.{name} is {value!r}. Give {{value: NUMBER, origin: {'|'.join(ORIGINS)}, how: TEXT}}."
        )
    return CalibrationEntry(_number(value["value"]), value["origin"], value["how"])


def _number(value: Any) -> Any:
    """Convert a number (YAML 1.1 reads 1e12 as text); return anything else unchanged, for `_faults`."""
    try:
        return float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else value
    except ValueError:
        return value


def _faults(entry: CalibrationEntry) -> list[str]:
    faults = []
    if not (_is_number(entry.value) and entry.value > 0):
        faults.append(f"value is {entry.value!r}; give a number above 0.")
    if entry.origin not in ORIGINS:
        faults.append(f"origin is {entry.origin!r}; there are {', '.join(ORIGINS)}.")
    if fault := _text_fault(entry.how):
        faults.append(f"how {fault}")
    return faults


def _text_fault(value: object) -> str | None:
    return None if isinstance(value, str) and value.strip() else f"is {value!r}; give a text."


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _with(device: Device, name: str, value: float) -> Device:
    changed: dict[str, Any] = {name: value}
    return replace(device, **changed)


def _raised(device: Device, peak: str, rate: float) -> Device:
    """Return `device` with a higher peak; its other shares are scaled so that their rates stay equal."""
    times = rate / getattr(device, peak)
    shares: dict[str, Any] = {share: getattr(device, share) / times for _, of, share in SHARES if of == peak}
    return replace(device, **{peak: rate, **shares})


_NAMES = ", ".join(RATES)
SHARES = (
    ("train_flops", "flops", "train_share"),
    ("prefill_flops", "flops", "prefill_share"),
    ("decode_bandwidth", "bandwidth", "decode_share"),
)
_BOUNDS = (
    ("matmul_flops", "flops", ("train_share", "prefill_share")),
    ("memory_bandwidth", "bandwidth", ("decode_share",)),
)
LINKS = ("link", "network", "host_link", "offload_link", "host_network")
