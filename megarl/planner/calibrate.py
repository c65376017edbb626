"""`plan --calibrate RUN`: the shares and factors of a device with which estimates give what a run measured. Pure.

A share is fitted to all phases that it decides together; what then remains of a phase becomes its factor.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from megarl.observe.files import write_whole
from megarl.planner.measured import Measured
from megarl.planner.plan import Estimate
from megarl.platform.devices import Device, as_entry
from megarl.words import several

_TRAINED = ("old_log_prob", "reference", "values", "update_critic", "update_actor")
_LEAST_LINK_SHARE = 0.05  # a smaller one says that something else than the links took the time
_HALVINGS = 24  # of a range of 60, in logarithms: to 4e-6
_COLUMNS = 100
_TOLD = 0.0005  # seconds: shorter phases that are not estimated are left out of the table
_NEAR = 0.01  # a factor this close to 1 is none


@dataclass(frozen=True)
class Row:
    """A phase's seconds: as measured, and as estimated with the device as it was and as fitted. None: there are none."""

    name: str
    measured: float | None
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Calibration:
    before: Device
    after: Device
    rows: list[Row]
    notes: list[str]


def calibrate(measured: Measured, device: Device, estimate: Callable[[Device], Estimate]) -> Calibration:
    """`estimate`: of the run's recipe, at its own lengths, with a device."""
    seconds, notes = _comparable(measured, estimate(device)), []

    def fit(names: tuple[str, ...], now: Device, scaled: Callable[[Device, float], Device]) -> Device:
        """`now` with its shares multiplied by what brings the sum of the phases to what was measured."""
        goal = sum(seconds.get(name, 0.0) for name in names)
        return _fitted(goal, now, scaled, lambda one: _sum(estimate(one), names, seconds)) if goal else now

    fitted = replace(device, factors={})
    fitted = fit(("gen", "teacher"), fitted, _scale_engines)
    fitted = fit(_TRAINED, fitted, _scale_training)
    linked = fit(("weight_exchange",), fitted, _scale_links)
    if linked.link_share >= _LEAST_LINK_SHARE or linked.link_share == fitted.link_share:
        fitted = fit(_TRAINED, linked, _scale_training)
    else:
        notes.append(
            f"link_share is left as it was: the exchange would ask for {linked.link_share:.1g}, so it is not the links that "
            "it waits for. It has a factor of its own."
        )
    if "gen" in {phase.name for phase in estimate(fitted).phases} and "gen" not in seconds:
        notes.append("gen is not fitted: nobody waited for it beside the trainers, so nobody knows how long it took.")
    factors = _factors(estimate(fitted), seconds)
    after = replace(fitted, factors=factors, source=f"fitted to {measured.run.name}; the rest as {device.name}")
    return Calibration(device, after, _rows(measured, seconds, estimate(device), estimate(after)), notes)


def write_entry(path: Path, calibration: Calibration) -> None:
    """A table of devices with the one that was fitted, whole: it needs no other file, from which the device may be."""
    device = calibration.after
    entry = as_entry(device)
    entry |= {name: float(f"{entry[name]:.4g}") for name in _SHARES if name in entry}
    text = yaml.safe_dump({device.name: entry}, sort_keys=False, allow_unicode=True)
    write_whole(path, f"# By `megarl plan --calibrate`; `megarl plan --devices` reads it.\n{text}".encode())


_SHARES = ("train_share", "prefill_share", "decode_share", "link_share")


def calibration_lines(calibration: Calibration, measured: Measured) -> list[str]:
    """The phases' seconds side by side, and what was fitted."""
    before, after = calibration.before, calibration.after
    lines = [
        str(measured.run),
        f"  medians of {several(measured.steps, 'step')}; {measured.lengths.assumed}",
        "",
        f"  {'phase':<16} {'measured':>11} {'estimated':>11} {'off':>8}   {'fitted':>11} {'off':>8}",
    ]
    for row in calibration.rows:
        lines.append(
            f"  {row.name:<16} {_told(row.measured)} {_told(row.before)} {_off(row.before, row.measured)}   "
            f"{_told(row.after)} {_off(row.after, row.measured)}"
        )
    changed = [f"{name} {getattr(before, name):.3g} -> {getattr(after, name):.3g}" for name in _SHARES]
    said = [f"{after.name}: {', '.join(changed)}"]
    if after.factors:
        said.append(f"factors: {', '.join(f'{name} {factor:.3g}' for name, factor in after.factors.items())}")
    wrapped = [line for text in [*said, *calibration.notes] for line in textwrap.wrap(text, _COLUMNS - 2)]
    return [line.rstrip() for line in [*lines, "", *(f"  {line}" for line in wrapped)]]


def _comparable(measured: Measured, estimate: Estimate) -> dict[str, float]:
    """What was measured of phases that are estimated. Sampling that runs beside the trainers is known only where they
    waited for it: it then took what they did and the wait, which lies in `drain`."""
    names = {phase.name for phase in estimate.phases}
    found = {name: value for name, value in measured.seconds.items() if name in names and value > 0}
    if "gen" in names and len(estimate.phases) > 1 and estimate.phases[1].begin == 0.0:
        beside = sum(value for name, value in found.items() if name not in ("gen", "weight_exchange"))
        waited = measured.seconds.get("gen", 0.0) + measured.seconds.get("drain", 0.0)
        found.pop("gen", None)
        if waited > _NEAR * measured.step:
            found["gen"] = beside + waited
    return found


def _sum(estimate: Estimate, names: tuple[str, ...], seconds: dict[str, float]) -> float:
    return sum(phase.seconds for phase in estimate.phases if phase.name in names and phase.name in seconds)


def _fitted(
    goal: float, now: Device, scaled: Callable[[Device, float], Device], total: Callable[[Device], float]
) -> Device:
    """Seconds fall where shares rise: halve the range of multiples, in logarithms, until it is a point."""
    low, high = -30.0, 30.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if total(scaled(now, math.exp(middle))) > goal:
            low = middle
        else:
            high = middle
    return scaled(now, math.exp((low + high) / 2))


def _scale_engines(device: Device, times: float) -> Device:
    prefill, decode = min(1.0, device.prefill_share * times), min(1.0, device.decode_share * times)
    return replace(device, prefill_share=prefill, decode_share=decode)


def _scale_training(device: Device, times: float) -> Device:
    return replace(device, train_share=min(1.0, device.train_share * times))


def _scale_links(device: Device, times: float) -> Device:
    return replace(device, link_share=min(1.0, device.link_share * times))


def _factors(estimate: Estimate, seconds: dict[str, float]) -> dict[str, float]:
    found = {phase.name: seconds[phase.name] / phase.seconds for phase in estimate.phases if phase.name in seconds}
    return {name: float(f"{factor:.4g}") for name, factor in found.items() if abs(factor - 1) > _NEAR}


def _rows(measured: Measured, seconds: dict[str, float], before: Estimate, after: Estimate) -> list[Row]:
    fitted = {phase.name: phase.seconds for phase in after.phases}
    rows = [Row(phase.name, seconds.get(phase.name), phase.seconds, fitted[phase.name]) for phase in before.phases]
    known = {row.name for row in rows}
    told = {name: value for name, value in measured.seconds.items() if name not in known and value >= _TOLD}
    others = [Row(name, value, None, None) for name, value in told.items()]
    rest = Row("between phases", measured.rest, None, None)
    return [
        *rows,
        *sorted(others, key=lambda row: row.name),
        rest,
        Row("step", measured.step, before.seconds, after.seconds),
    ]


def _told(value: float | None) -> str:
    return f"{value:>9.3f} s" if value is not None else f"{'-':>11}"


def _off(estimated: float | None, measured: float | None) -> str:
    if not estimated or not measured:
        return f"{'':>8}"
    return f"{estimated / measured - 1:>+8.0%}"
