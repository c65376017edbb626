"""Command `plan`: can a recipe work, what does each device hold, and how long does a step take?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.atomic_files import check_target
from megarl.commands.plan.build import make_plan
from megarl.commands.plan.count.types import RecipePlan
from megarl.commands.plan.environment import environment_of
from megarl.commands.plan.options import SECONDS, PlanOptions, device_of, host_memory_notes
from megarl.commands.plan.preflight import checked, require
from megarl.commands.plan.progress import Report, on_stderr, silent
from megarl.commands.plan.routes import as_expected, expected_routes
from megarl.commands.plan.search.search import load_for_search, require_device, search, subject_of
from megarl.commands.plan.search.suggest import with_suggestions
from megarl.commands.plan.show import search_console, verdict
from megarl.commands.plan.show.console import show
from megarl.commands.plan.show.page import render
from megarl.commands.plan.time.calibrate import calibrate_run
from megarl.commands.plan.time.calibration import read_calibration
from megarl.commands.plan.time.estimate import with_estimate
from megarl.engines.routes import check_route
from megarl.errors import InputError, as_input_error
from megarl.hf.shape import largest
from megarl.observe.html import write_html
from megarl.platform.device_table import Device
from megarl.preflight.findings import Survey
from megarl.preflight.load import load_recipe
from megarl.preflight.models import CRITIC, JUDGE_PATH, POLICY

_SECTIONS = {POLICY: "rollout", CRITIC: "critic", JUDGE_PATH: "judge"}


def plan(path: Path, overrides: Sequence[str], options: PlanOptions, model: str | None = None) -> int:
    """Print the plan of a recipe. Returns 1 if a phase needs more than the device or its host has, else 0.

    With `options.search`: print layouts that fit; 1 if none was found. Raises InputError for wrong options and input.
    """
    kind, table, device_notes = _device(path, options)
    report = silent if options.as_json else on_stderr
    report(f"checking {path}, its models and its data")
    if options.search:
        return _search(path, overrides, options, model, require_device(kind), device_notes, report)
    with with_suggestions(path, overrides, model, kind):
        recipe = load_recipe(path, overrides)
        look = checked(recipe, path, model)
        require(look, strict=options.strict)
    models = _models(look)
    with as_input_error():
        if options.calibrate is not None:
            print("\n".join(calibrate_run(recipe, models, _of_run(kind), options.calibrate, options.out)))
            return 0
        environment = environment_of(recipe, models, kind)
        for route in expected_routes(recipe, kind)[:1]:
            check_route(recipe, route, models.get("rollout"))
        result = make_plan(recipe, models, kind, memory=options.memory, response=options.response, report=report)
        if kind is not None:
            result = with_estimate(result, recipe, models, kind, table, options.response)
    result = replace(
        result,
        unchecked=[*result.unchecked, *look.texts("unavailable")],
        notes=[*look.texts("notice"), *device_notes, *result.notes],
        environment=environment,
    )
    if options.html is not None:
        write_html(options.html, render(result))
    if options.as_json:
        print(json.dumps(as_dict(result)))
    else:
        show(result)
        verdict.show(verdict.of_plan(result, path, overrides, arguments_of(options, model)))
    return int(bool(result.refusals))


def _device(path: Path, options: PlanOptions) -> tuple[Device | None, Device | None, list[str]]:
    """Return the plan's device with its calibration and without, and notes on the choice. Faults in files are reported even
    if the device is unknown."""
    options.check()
    if options.html is not None:
        with as_input_error():
            check_target("--html", options.html)
    calibration = read_calibration(options.calibration) if options.calibration is not None else None
    kind, notes = device_of(path, options.device, options.devices)
    options.check_with(kind)
    if kind is None:
        return None, None, notes
    if options.memory is not None:
        kind = replace(kind, memory=options.memory)
    if options.host_memory is not None:
        kind = replace(kind, host_memory=options.host_memory)
    notes = [*notes, *host_memory_notes(kind, options)]
    return calibration.apply(kind) if calibration is not None else kind, kind, notes


def _search(
    path: Path,
    overrides: Sequence[str],
    options: PlanOptions,
    model: str | None,
    device: Device,
    notes: list[str],
    report: Report,
) -> int:
    recipe, divides = load_for_search(path, overrides, model, device)
    look = checked(divides, path, model)
    require(look, strict=options.strict)
    models = _models(look)
    with as_input_error():
        routes = expected_routes(divides, device)
        for route in routes[:1]:
            check_route(divides, route, models.get("rollout"))
        subject = subject_of(as_expected(recipe, routes), models, device, options.response)
        result = search(subject, seconds=options.seconds or SECONDS, report=report)
        result = replace(result, unchecked=look.texts("unavailable"), notes=[*look.texts("notice"), *notes])
        if options.as_json:
            print(search_console.as_json(subject, result))
        else:
            search_console.show(subject, result)
            verdict.show(verdict.of_search(subject, result, path, overrides, arguments_of(options, model)))
    return int(not result.best)


def arguments_of(options: PlanOptions, model: str | None) -> list[str]:
    """Return the options of a plan, as arguments of another one."""
    return [*options.arguments(), *(["--model", model] if model is not None else [])]


def _models(look: Survey) -> dict[str, dict[str, Any]]:
    """Return the config.json of each model, by section of the recipe; of several teachers the largest."""
    teachers = [config for key, config in look.configs.items() if key not in _SECTIONS]
    models = {_SECTIONS[key]: config for key, config in look.configs.items() if key in _SECTIONS}
    return {**models, "teacher": largest(teachers)} if teachers else models


def as_dict(plan: RecipePlan) -> dict[str, object]:
    """Return the plan as plain values, with the totals that the console shows."""
    result = asdict(plan)
    for place, plain in zip(plan.places, result["places"], strict=True):
        plain["peak"] = {"phase": place.peak.phase, "total": place.peak.total}
    if plan.estimate is not None:
        result["estimate"]["tokens_per_second"] = plan.estimate.tokens_per_second
    return result


def _of_run(device: Device | None) -> Device:
    if device is None:
        raise InputError("--calibrate fits a device: name the run's device with --device.")
    return device
