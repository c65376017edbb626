"""The command `plan`: whether a recipe can work, and what each of its devices holds and does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.atomic_files import check_target
from megarl.commands.plan.build import make_plan
from megarl.commands.plan.count.types import Plan
from megarl.commands.plan.environment import environment_of
from megarl.commands.plan.options import SECONDS, Options, device_of
from megarl.commands.plan.preflight import Checked, checked
from megarl.commands.plan.routes import expected_routes
from megarl.commands.plan.search.command import known, proposing, search_layouts, to_lay_out
from megarl.commands.plan.show.console import show
from megarl.commands.plan.show.page import write_page
from megarl.commands.plan.time.calibrate_command import calibrate_run
from megarl.commands.plan.time.calibration import read_calibration
from megarl.commands.plan.time.timed import with_estimate
from megarl.engines.routes import check_route
from megarl.errors import InputError, as_input_error
from megarl.platform.devices import Device
from megarl.preflight.load import load_recipe
from megarl.preflight.models import CRITIC, JUDGE, POLICY, TEACHER

_SECTIONS = {POLICY: "rollout", CRITIC: "critic", TEACHER: "teacher", JUDGE: "judge"}


def plan(path: Path, overrides: Sequence[str], options: Options, model: str | None = None) -> int:
    """Print the plan. 1 where some phase needs more than the device or its host has, else 0. With `options.search`: print
    layouts that fit; 1 where there are none. Raises InputError for options and input that are wrong."""
    kind, table, of_machines = _device(path, options)
    if options.search:
        return _search(path, overrides, options, model, known(kind))
    with proposing(path, overrides, model, kind):
        recipe = load_recipe(path, overrides)
        look = checked(recipe, path, model)
        look.require(strict=options.strict)
    models = _models(look)
    with as_input_error():
        if options.calibrate is not None:
            print("\n".join(calibrate_run(recipe, models, _of_run(kind), options.calibrate, options.out)))
            return 0
        environment = environment_of(recipe, models, kind)
        for route in expected_routes(recipe, kind)[:1]:
            check_route(recipe, route)
        made = make_plan(recipe, models, kind, memory=options.memory, response=options.response)
        if kind is not None:
            made = with_estimate(made, recipe, models, kind, table, options.response)
    made = replace(
        made,
        unchecked=[*made.unchecked, *look.unchecked],
        notes=[*look.notes, *of_machines, *made.notes],
        environment=environment,
    )
    if options.html is not None:
        write_page(made, options.html)
    if options.as_json:
        print(json.dumps(as_dict(made)))
    else:
        show(made)
    return int(bool(made.refusals))


def _device(path: Path, options: Options) -> tuple[Device | None, Device | None, list[str]]:
    """The device that the plan is for, with its calibration and without, and notes on the choice. Files come first: an
    unreadable one is reported whatever the device is."""
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
    return calibration.apply(kind) if calibration is not None else kind, kind, notes


def _search(path: Path, overrides: Sequence[str], options: Options, model: str | None, device: Device) -> int:
    recipe, divides = to_lay_out(path, overrides, model, device)
    look = checked(divides, path, model)
    look.require(strict=options.strict)
    seconds = options.seconds or SECONDS
    return search_layouts(
        recipe, _models(look), device, response=options.response, seconds=seconds, as_json=options.as_json
    )


def _models(look: Checked) -> dict[str, dict[str, Any]]:
    """The config.json of each model, by its section of the recipe."""
    return {_SECTIONS[key]: config for key, config in look.models.items()}


def as_dict(made: Plan) -> dict[str, object]:
    """All of the plan in plain values; with what is computed from them where the console shows it."""
    found = asdict(made)
    for place, plain in zip(made.places, found["places"], strict=True):
        plain["peak"] = {"phase": place.peak.phase, "total": place.peak.total}
    if made.estimate is not None:
        found["estimate"]["tokens_per_second"] = made.estimate.tokens_per_second
    return found


def _of_run(device: Device | None) -> Device:
    if device is None:
        raise InputError("--calibrate fits a device: say with --device which one the run had.")
    return device
