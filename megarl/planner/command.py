"""The command `plan`: whether a recipe can work, and what each of its devices holds and does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.config.errors import InputError, blaming_input
from megarl.config.load import load_recipe
from megarl.config.schema import Recipe
from megarl.engines.routes import check_route
from megarl.model_config import number_of_experts, text_fields
from megarl.observe.files import check_target
from megarl.planner.build import make_plan
from megarl.planner.calibrate_command import calibrate_run
from megarl.planner.calibration import read_calibration
from megarl.planner.checks import checked
from megarl.planner.environment import environment_of
from megarl.planner.estimate import estimate_of
from megarl.planner.options import SECONDS, Options, device_of
from megarl.planner.page import write_page
from megarl.planner.plan import Plan
from megarl.planner.routes import expected_routes
from megarl.planner.search_command import known, proposing, search_layouts, to_lay_out
from megarl.planner.show import show
from megarl.planner.spread import published_ratios, spreads
from megarl.platform.devices import Device
from megarl.preflight_model import CRITIC, JUDGE, POLICY, TEACHER

_SECTIONS = {POLICY: "rollout", CRITIC: "critic", TEACHER: "teacher", JUDGE: "judge"}


def plan(
    path: Path,
    overrides: Sequence[str],
    *,
    model: str | None,
    device: str | None,
    memory: float | None,
    as_json: bool,
    devices: Path | None = None,
    calibration: Path | None = None,
    host_memory: float | None = None,
    response: float | None = None,
    calibrate: Path | None = None,
    out: Path | None = None,
    html: Path | None = None,
    strict: bool = False,
    search: bool = False,
    seconds: float | None = None,
) -> int:
    """Print the plan. 1 where some phase needs more than the device has, else 0. `search`: print layouts that fit, found
    in `seconds`; 1 where there are none."""
    options = Options(
        memory, html, out, calibrate, devices, response, search, seconds, as_json, calibration, host_memory
    )
    options.check()
    if html is not None:
        with blaming_input():
            check_target("--html", html)
    kind, of_machines = device_of(path, device, devices)
    options.check_with(kind)
    if kind is not None and memory is not None:
        kind = replace(kind, memory=memory)
    if kind is not None and host_memory is not None:
        kind = replace(kind, host_memory=host_memory)
    table = kind
    if kind is not None and calibration is not None:
        kind = read_calibration(calibration).apply(kind)
    if search:
        recipe, divides = to_lay_out(path, overrides, model, known(kind))
        look = checked(divides, path, model)
        look.require(strict=strict)
        models = {_SECTIONS[key]: config for key, config in look.models.items()}
        return search_layouts(recipe, models, kind, response=response, seconds=seconds or SECONDS, as_json=as_json)
    with proposing(path, overrides, model, kind):
        recipe = load_recipe(path, overrides)
        look = checked(recipe, path, model)
        look.require(strict=strict)
    models = {_SECTIONS[key]: config for key, config in look.models.items()}
    with blaming_input():
        if calibrate is not None:
            print("\n".join(calibrate_run(recipe, models, _of_run(kind), calibrate, out)))
            return 0
        environment = environment_of(recipe, models, kind)
        for route in expected_routes(recipe, kind)[:1]:
            check_route(recipe, route)
        made = make_plan(recipe, models, kind, memory=memory, response=response)
        if kind is not None:
            made = with_estimate(made, recipe, models, kind, table, response)
    made = replace(
        made,
        unchecked=[*made.unchecked, *look.unchecked],
        notes=[*look.notes, *of_machines, *made.notes],
        environment=environment,
    )
    if html is not None:
        write_page(made, html)
    if as_json:
        print(json.dumps(as_dict(made)))
    else:
        show(made)
    return int(bool(made.refusals))


def with_estimate(
    made: Plan,
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device,
    table: Device | None,
    response: float | None,
) -> Plan:
    """`made` with its seconds. With a calibrated `device`, those of the `table`'s device stand beside; without, the range over
    published runs of such models."""
    found = estimate_of(made, recipe, models, device, response=response)
    if table is not None and table != device:
        raw = estimate_of(made, recipe, models, table, response=response)
        return replace(made, estimate=replace(found, uncalibrated=raw))
    if device.factors:
        return replace(made, estimate=found)
    experts = bool(number_of_experts(text_fields(models["rollout"])))
    return replace(made, estimate=found, spread=spreads(found, experts=experts, ratios=published_ratios()))


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
