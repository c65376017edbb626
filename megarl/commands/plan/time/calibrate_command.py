"""`plan RECIPE --calibrate RUN [--out FILE]`: fits a device to a run and compares estimates with measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.atomic_files import check_new
from megarl.commands.plan.build import make_plan
from megarl.commands.plan.count.types import Estimate
from megarl.commands.plan.time.calibrate import calibrate, calibration_lines, calibration_of
from megarl.commands.plan.time.estimate import estimate_of
from megarl.commands.plan.time.measured import read_run
from megarl.errors import as_input_error
from megarl.hf.shape import model_shape
from megarl.platform.devices import Device
from megarl.recipe.schema import Recipe


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
        return estimate_of(counted, recipe, models, candidate, lengths=measured.lengths, tried=measured.tried)

    fit = calibrate(measured, device, estimate_on)
    lines = calibration_lines(fit, measured)
    if out is not None:
        calibration_of(fit, measured).write(out)
        lines.append(f"  written to {out}: plan RECIPE --device {device.name} --calibration {out}")
    return lines
