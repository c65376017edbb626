"""Command `simulate`: which rule, staleness, window, split of devices and over-sampling make a recipe fast, and at which lag?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.objective import needs_teacher
from megarl.atomic_files import check_target
from megarl.commands.plan.options import device_of
from megarl.commands.plan.time.calibration import read_calibration
from megarl.commands.simulate.cli_options import STEPS
from megarl.commands.simulate.group_filter import parse_filtered
from megarl.commands.simulate.lengths import parse_lengths
from megarl.commands.simulate.planned import SimulatedRecipe
from megarl.commands.simulate.show.console import show
from megarl.commands.simulate.show.page import render
from megarl.commands.simulate.study import CONTROLLER_BYTES, SimulatedRun, Study, study
from megarl.errors import InputError, NotHereError, as_input_error
from megarl.hf.shape import largest
from megarl.observe.html import write_html
from megarl.platform.device_table import Device
from megarl.preflight.load import load_recipe
from megarl.preflight.models import config_of, policy_config_of
from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class SimulateOptions:
    """Options of the command line; None: the option is absent."""

    device: str | None = None
    device_file: Path | None = None
    calibration: Path | None = None
    devices: int | None = None
    lengths: str | None = None
    response: float | None = None
    filtered: str | None = None
    max_lag: int | None = None
    steps: int = STEPS
    seed: int = 0
    html: Path | None = None
    as_json: bool = False


def simulate(path: Path, overrides: Sequence[str], options: SimulateOptions, model: str | None = None) -> None:
    """Print the simulated runs of a recipe. Raises InputError for wrong options and for recipes that it does not cover."""
    if options.html is not None:
        with as_input_error():
            check_target("--html", options.html)
    device, notes = _device(path, options)
    recipe = load_recipe(path, overrides)
    _check(recipe)
    with as_input_error():
        models, more = _models(recipe, path, model)
        subject = SimulatedRecipe(
            recipe=recipe,
            models=models,
            device=device,
            devices=device_count(recipe) if options.devices is None else options.devices,
            lengths=parse_lengths(options.lengths, options.response, recipe),
            seed=options.seed,
            filtered=parse_filtered(options.filtered, options.lengths, recipe.algorithm.dynamic_sampling),
        )
        result = study(subject, steps=options.steps, max_lag=options.max_lag)
    result.notes += [*more, *notes]
    if options.html is not None:
        write_html(options.html, render(result))
    if options.as_json:
        print(json.dumps(as_dict(result)))
    else:
        show(result)


def device_count(recipe: Recipe) -> int:
    """Return the devices of the recipe's trainers and policy engines."""
    apart = recipe.cluster.placement == "disaggregated"
    return recipe.cluster.trainers + (recipe.rollout.engines * recipe.rollout.tensor_parallel if apart else 0)


def as_dict(result: Study) -> dict[str, Any]:
    """Return the study as plain values, for --json."""

    def plain(run: SimulatedRun) -> dict[str, Any]:
        return {
            "rule": run.name,
            "max_staleness": run.setting.max_staleness,
            "window": run.setting.window,
            "oversample": run.schedule.oversample,
            "trainers": run.setting.trainers,
            "engines": run.engines,
            "engine_devices": run.engine_devices,
            "gain": run.gain,
            "steps_per_hour": 3600 / run.outcome.step_seconds,
            **asdict(run.outcome),
            "length_bias": run.outcome.length_bias,
            "lag_bound": run.schedule.max_lag,
            "pending_bytes": result.pending_bytes(run),
            "controller_bytes": run.outcome.pending_samples * CONTROLLER_BYTES,
        }

    return {
        "recipe": result.recipe,
        "device": result.device,
        "devices": result.devices,
        "runs": [plain(run) for run in result.runs],
        "splits": [plain(run) for run in result.splits],
        "oversampled": [
            {"runs": [plain(run) for run in each.runs], "recommended": each.best.schedule.oversample}
            for each in result.oversampled
        ],
        "recommended": {**plain(result.best), "settings": result.settings},
        "recommended_colocated": None
        if result.best_colocated is None
        else {**plain(result.best_colocated), "settings": result.colocated_settings},
        "notes": result.notes,
    }


def _device(path: Path, options: SimulateOptions) -> tuple[Device, list[str]]:
    calibration = read_calibration(options.calibration) if options.calibration is not None else None
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    device, notes = device_of(path, options.device, options.device_file)
    if device is None:
        raise InputError(
            "simulate estimates seconds for a device, and the recipe's head names none: give --device, e.g. 910B or H100."
        )
    return calibration.apply(device) if calibration is not None else device, notes


def _check(recipe: Recipe) -> None:
    """Raise InputError for a recipe that simulate does not cover."""
    if recipe.train.source != "rollout":
        raise InputError(f"train.source={recipe.train.source}: nothing is sampled, so there is nothing to simulate.")
    if uses_critic(recipe.algorithm):
        raise InputError(
            f"algorithm.advantage={recipe.algorithm.advantage} trains a critic, which is not simulated yet. `megarl plan` estimates the "
            "step of this recipe."
        )
    if ADVANTAGES[recipe.algorithm.advantage].needs_greedy:
        raise InputError(
            f"algorithm.advantage={recipe.algorithm.advantage} also samples a greedy response per prompt, which is not simulated yet. "
            "`megarl plan` estimates the step of this recipe."
        )


def _models(recipe: Recipe, path: Path, model: str | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the config.json of policy and teacher by section, and notes."""
    models, notes = {"rollout": policy_config_of(recipe.model, path, model)}, list[str]()
    if recipe.reward.uses_judge:
        notes.append(
            "The devices of the judge's engines are not among the simulated devices, and its verdicts take no time."
        )
    if needs_teacher(recipe.algorithm):
        notes.append("The devices of the teacher's engines are not among the simulated devices.")
        try:
            teachers = recipe.teacher.by_key.items()
            models["teacher"] = largest(config_of(str(teacher.path), path, key) for key, teacher in teachers)
        except NotHereError:
            notes.append("The teacher is assumed to be as large as the policy: its config.json is not here.")
    return models, notes
