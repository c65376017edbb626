"""A layout for a first recipe: the fastest by estimate among the layouts that leave room on the devices by arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.commands.init.answers import Machines
from megarl.hf.shape import ModelShape
from megarl.platform.device_table import Device
from megarl.preflight.load import load_recipe

_MOST_TRAINER = 0.7  # of the device, for the lower bound of a trainer's memory: activations and libraries come on top
_MOST_ENGINE = 0.45  # of the device, for an engine's weights: the rest is for its cache, and for what trainers keep
_WEIGHT_BYTES = 2  # bfloat16


def first_layout(
    recipe_file: Path, machines: Machines, model: dict[str, Any] | None
) -> tuple[dict[str, Any], str | None]:
    """Return the settings of the layout by dotted key, and a notice if no device or layout is known for the model.

    recipe_file: the recipe without these settings. model: config.json; None: unknown, so the layout is a guess.
    """
    recipe = load_recipe(recipe_file, check=False)
    sampling = recipe.train.source == "rollout"
    guess: dict[str, Any] = {"rollout.engines": machines.devices} if sampling else {}
    if not machines.accelerated:
        return {"rollout.engines": 1} if sampling else {}, None
    guess["megatron.recompute"] = "full"
    if machines.device is None:
        return guess, f"the memory of {machines.kind} devices is unknown, so the layout is a guess"
    if model is None:
        return guess, None
    device = replace(machines.device, per_node=machines.per_node)
    settings = [f"{key}={value}" for key, value in guess.items()]
    chosen = _fastest(load_recipe(recipe_file, settings, check=False), model, device)
    if chosen is None:
        return guess, f"no layout fits {machines.devices} devices by arithmetic: use more devices, or a smaller model"
    return guess | chosen, None


def _fastest(recipe: Any, model: dict[str, Any], device: Device) -> dict[str, Any] | None:
    """Return the settings of the fastest layout that leaves room; None if there is none."""
    from megarl.commands.plan.search import layouts as space
    from megarl.commands.plan.search.fits import Subject
    from megarl.commands.plan.search.lower_bound import min_peak_bytes

    subject = Subject(recipe, model, None, device)
    shape, limit = subject.shape, subject.limit
    fitting = (
        engines
        for engines in space.engine_layouts(recipe, model, device.per_node)
        if recipe.train.source != "rollout" or _engine_bytes(shape, engines) <= _MOST_ENGINE * limit
    )
    engines = min(fitting, key=lambda each: (each.data_parallel, each.tensor_parallel), default=None)
    if engines is None:
        return None
    best: tuple[float, Any] | None = None
    for layout in space.layouts(recipe, model, device.per_node):
        if layout.virtual_pipeline is not None:
            continue
        choice = replace(space.choice_of(recipe), layout=layout, engines=engines)
        candidate = space.apply_choice(recipe, choice)
        if min_peak_bytes(candidate, shape) > _MOST_TRAINER * limit or space.refusal(candidate, model) is not None:
            continue
        seconds = subject.step_seconds(candidate)
        if best is None or seconds < best[0]:
            best = seconds, candidate
    if best is None:
        return None
    return {
        key: getattr(getattr(best[1], section), field)
        for key in space.VARIED
        for section, field in [key.split(".")]
        if getattr(getattr(best[1], section), field) != getattr(getattr(recipe, section), field)
    }


def _engine_bytes(shape: ModelShape, engines: Any) -> float:
    """Return the bytes of an engine's weights on one of its devices, at most."""
    return _WEIGHT_BYTES * shape.total / engines.tensor_parallel
