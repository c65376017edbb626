"""A layout for a first recipe: the fastest by estimate among the layouts that leave room on the devices by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.commands.init.answers import Machines
from megarl.errors import pluralize
from megarl.hf.shape import ModelShape
from megarl.platform.device_table import Device
from megarl.preflight.load import load_recipe

_MOST_TRAINER = 0.7  # of the device, for the lower bound of a trainer's memory: activations and libraries come on top
_MOST_TIGHT = 0.9  # the same, if no layout leaves that much: `plan` counts exactly whether the rest is enough
_TIGHT_MARGIN = 0.02  # of the device: layouts that differ by less count as equally small
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
    chosen = _chosen(load_recipe(recipe_file, settings, check=False), model, device)
    if chosen is None:
        return guess, (
            f"no layout fits {pluralize(machines.devices, 'device')} by arithmetic: use more devices, or a smaller model. Not tried: "
            "groups of engines, and optimizer states outside the devices, as in the recipes of docs/supported_recipes.md"
        )
    layout, peak = chosen
    if peak <= _MOST_TRAINER:
        return guess | layout, None
    return guess | layout, (
        f"memory is tight: this layout, one of the smallest, takes at least {peak:.0%} of each {device.name} before most "
        "activations. `megarl plan` counts the rest"
    )


def _chosen(recipe: Any, model: dict[str, Any], device: Device) -> tuple[dict[str, Any], float] | None:
    """Return the settings of a layout, and the lower bound of its memory as a share of the device; None: none fits.

    It is the fastest by estimate among the layouts that leave room, else among the smallest ones.
    """
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
    candidates: list[tuple[float, Any]] = []
    for layout in space.layouts(recipe, model, device.per_node):
        if layout.virtual_pipeline is not None:
            continue
        candidate = space.apply_choice(recipe, replace(space.choice_of(recipe), layout=layout, engines=engines))
        peak = min_peak_bytes(candidate, shape) / limit
        if peak <= _MOST_TIGHT and space.refusal(candidate, model) is None:
            candidates.append((peak, candidate))
    if not candidates:
        return None
    most = max(_MOST_TRAINER, min(peak for peak, _ in candidates) + _TIGHT_MARGIN)
    peak, best = min((each for each in candidates if each[0] <= most), key=lambda each: subject.step_seconds(each[1]))
    return _changes(recipe, best, space.VARIED), peak


def _changes(recipe: Any, candidate: Any, keys: Iterable[str]) -> dict[str, Any]:
    """Return the settings of `candidate` that differ from the recipe's, by dotted key."""

    def value(owner: Any, key: str) -> Any:
        section, field = key.split(".")
        return getattr(getattr(owner, section), field)

    return {key: value(candidate, key) for key in keys if value(candidate, key) != value(recipe, key)}


def _engine_bytes(shape: ModelShape, engines: Any) -> float:
    """Return the bytes of an engine's weights on one of its devices, at most."""
    return _WEIGHT_BYTES * shape.total / engines.tensor_parallel
