"""`plan RECIPE --calibrate RUN [--out FILE]`: a device as a run found it, beside what was estimated of it."""

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
    """Lines for the console; `out` is written. `models`: of `make_plan`. Raises InputError for a run of something else."""
    with as_input_error():
        if out is not None:
            check_new("--out", out)
        measured = read_run(run, recipe, model_shape(models["rollout"]))
        counted = make_plan(recipe, models, device, advise=False)

    def of(one: Device) -> Estimate:
        return estimate_of(counted, recipe, models, one, lengths=measured.lengths, tried=measured.tried)

    found = calibrate(measured, device, of)
    lines = calibration_lines(found, measured)
    if out is not None:
        calibration_of(found, measured).write(out)
        lines.append(f"  written to {out}: plan RECIPE --device {device.name} --calibration {out}")
    return lines
