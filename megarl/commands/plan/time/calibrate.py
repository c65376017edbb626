"""`plan RECIPE --calibrate RUN [--out FILE]`: fits a device's shares and factors to the measured seconds of a run.

A share is fitted to the sum of all phases that it affects; the remaining deviation of a phase becomes its factor.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.atomic_files import check_new
from megarl.commands.plan.build import make_plan
from megarl.commands.plan.count.types import Estimate
from megarl.commands.plan.time.calibration import LINKS, SHARES, Calibration, CalibrationEntry
from megarl.commands.plan.time.estimate import estimate
from megarl.commands.plan.time.measured import Measured, read_run
from megarl.errors import as_input_error, pluralize
from megarl.hf.shape import model_shape
from megarl.platform.device_table import Device
from megarl.recipe.schema import Recipe

_TRAINED = ("old_log_prob", "reference", "values", "update_critic", "update_actor")
_LEAST_LINK_SHARE = 0.05  # a smaller share means that the links were not the bottleneck
_HALVINGS = 24  # of a range of 60 in logarithms: precision 4e-6
_COLUMNS = 100
_SHOWN = 0.0005  # seconds: shorter phases without an estimate are left out of the table
_NEAR = 0.01  # a factor this close to 1 is left out


@dataclass(frozen=True)
class PhaseFit:
    """Seconds of a phase: measured, and estimated before and after the fit. None: not available."""

    name: str
    measured: float | None
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Fit:
    """A device before and after fitting, with a table of measurements and estimates."""

    before: Device
    after: Device
    rows: list[PhaseFit]
    notes: list[str]


def calibrate_run(
    recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device, run: Path, out: Path | None
) -> list[str]:
    """Return lines for the console, and write `out`. `models`: as in `make_plan`. Raises InputError for another recipe's run."""
    with as_input_error():
        if out is not None:
            check_new("--out", out)
        measured = read_run(run, recipe, model_shape(models["rollout"]))
        counted = make_plan(recipe, models, device, advise=False)

    def estimate_on(candidate: Device) -> Estimate:
        links, lengths, tried = counted.weight_sync, measured.lengths, measured.tried
        return estimate(recipe, models, candidate, lengths=lengths, engine=counted.engine, links=links, tried=tried)

    fit = calibrate(measured, device, estimate_on)
    lines = calibration_lines(fit, measured)
    if out is not None:
        calibration_of(fit, measured).write(out)
        lines.append(f"  written to {out}: plan RECIPE --device {device.name} --calibration {out}")
    return lines


def calibrate(measured: Measured, device: Device, estimate_on: Callable[[Device], Estimate]) -> Fit:
    """Fit `device` to a run. `estimate_on`: returns the estimate of the run's recipe, with the run's lengths, on a device."""
    seconds, notes = _comparable(measured, estimate_on(device)), []

    def fit(names: tuple[str, ...], now: Device, scaled: Callable[[Device, float], Device]) -> Device:
        """Scale shares of `now` so that the sum of the phases equals the measured sum."""
        goal = sum(seconds.get(name, 0.0) for name in names)
        return _fitted(goal, now, scaled, lambda device: _sum(estimate_on(device), names, seconds)) if goal else now

    fitted = replace(device, factors={})
    fitted = fit(("gen", "teacher"), fitted, _scale_engines)
    fitted = fit(_TRAINED, fitted, _scale_training)
    linked = fit(("weight_sync",), fitted, _scale_links)
    if linked.link_share >= _LEAST_LINK_SHARE or linked.link_share == fitted.link_share:
        fitted = fit(_TRAINED, linked, _scale_training)
    else:
        notes.append(
            f"link_share is unchanged: weight sync would need {linked.link_share:.1g}, so the links are not its bottleneck. "
            "It gets a factor instead."
        )
    if "gen" in {phase.name for phase in estimate_on(fitted).phases} and "gen" not in seconds:
        notes.append("gen is not fitted: the trainers never waited for it, so no timing contains its seconds.")
    factors = _factors(estimate_on(fitted), seconds)
    after = replace(fitted, factors=factors, source=f"fitted to {measured.run.name}; the rest as {device.name}")
    return Fit(device, after, _rows(measured, seconds, estimate_on(device), estimate_on(after)), notes)


def calibration_of(fit: Fit, measured: Measured) -> Calibration:
    """Return a calibration with rates for the fitted shares, and with the factors."""
    before, after = fit.before, fit.after
    how = f"{pluralize(measured.steps, 'step')} of {measured.run.name}"

    def entry(value: float) -> CalibrationEntry:
        return CalibrationEntry(value, "fitted", how)

    rates = {
        name: entry(getattr(after, peak) * getattr(after, share))
        for name, peak, share in (*SHARES, *((link, link, "link_share") for link in LINKS if link != "offload_link"))
        if getattr(after, share) != getattr(before, share)
    }
    if "host_link" in rates and after.offload_link is not None:
        rates["offload_link"] = entry(after.offload_rate)
    factors = {name: CalibrationEntry(value, "measured", how) for name, value in after.factors.items()}
    return Calibration(before.name, f"fitted to {how}", rates, factors)


_SHARES = ("train_share", "prefill_share", "decode_share", "link_share")


def calibration_lines(calibration: Fit, measured: Measured) -> list[str]:
    """Format the table of phases, the fitted shares and the factors."""
    before, after = calibration.before, calibration.after
    lines = [
        str(measured.run),
        f"  medians of {pluralize(measured.steps, 'step')}; {measured.lengths.assumed}",
        "",
        f"  {'phase':<16} {'measured':>11} {'estimated':>11} {'off':>8}   {'fitted':>11} {'off':>8}",
    ]
    for row in calibration.rows:
        lines.append(
            f"  {row.name:<16} {_seconds(row.measured)} {_seconds(row.before)} {_off(row.before, row.measured)}   "
            f"{_seconds(row.after)} {_off(row.after, row.measured)}"
        )
    changed = [f"{name} {getattr(before, name):.3g} -> {getattr(after, name):.3g}" for name in _SHARES]
    sentences = [f"{after.name}: {', '.join(changed)}"]
    if after.factors:
        sentences.append(f"factors: {', '.join(f'{name} {factor:.3g}' for name, factor in after.factors.items())}")
    wrapped = [line for text in [*sentences, *calibration.notes] for line in textwrap.wrap(text, _COLUMNS - 2)]
    return [line.rstrip() for line in [*lines, "", *(f"  {line}" for line in wrapped)]]


def _comparable(measured: Measured, estimate: Estimate) -> dict[str, float]:
    """Return the measured seconds of the estimated phases.

    Sampling that overlaps training is known only if trainers waited for it: then it took the trainers' time plus the wait,
    which is in `drain`.
    """
    names = {phase.name for phase in estimate.phases}
    seconds = {name: value for name, value in measured.seconds.items() if name in names and value > 0}
    if "gen" in names and len(estimate.phases) > 1 and estimate.phases[1].begin == 0.0:
        overlapped = sum(value for name, value in seconds.items() if name not in ("gen", "weight_sync"))
        waited = measured.seconds.get("gen", 0.0) + measured.seconds.get("drain", 0.0)
        seconds.pop("gen", None)
        if waited > _NEAR * measured.step:
            seconds["gen"] = overlapped + waited
    return seconds


def _sum(estimate: Estimate, names: tuple[str, ...], seconds: dict[str, float]) -> float:
    return sum(phase.seconds for phase in estimate.phases if phase.name in names and phase.name in seconds)


def _fitted(
    goal: float, now: Device, scaled: Callable[[Device, float], Device], total: Callable[[Device], float]
) -> Device:
    """Bisect the scale of the shares, in logarithms: seconds fall as shares rise."""
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
    ratios = {phase.name: seconds[phase.name] / phase.seconds for phase in estimate.phases if phase.name in seconds}
    return {name: float(f"{factor:.4g}") for name, factor in ratios.items() if abs(factor - 1) > _NEAR}


def _rows(measured: Measured, seconds: dict[str, float], before: Estimate, after: Estimate) -> list[PhaseFit]:
    fitted = {phase.name: phase.seconds for phase in after.phases}
    rows = [PhaseFit(phase.name, seconds.get(phase.name), phase.seconds, fitted[phase.name]) for phase in before.phases]
    estimated = {row.name for row in rows}
    shown = {name: value for name, value in measured.seconds.items() if name not in estimated and value >= _SHOWN}
    remaining = [PhaseFit(name, value, None, None) for name, value in shown.items()]
    rest = PhaseFit("between phases", measured.rest, None, None)
    return [
        *rows,
        *sorted(remaining, key=lambda row: row.name),
        rest,
        PhaseFit("step", measured.step, before.seconds, after.seconds),
    ]


def _seconds(value: float | None) -> str:
    return f"{value:>9.3f} s" if value is not None else f"{'-':>11}"


def _off(estimated: float | None, measured: float | None) -> str:
    if not estimated or not measured:
        return f"{'':>8}"
    return f"{estimated / measured - 1:>+8.0%}"
