"""A layout for a first recipe: the fastest by estimate among the layouts that leave room on the devices by arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megarl.commands.init.answers import Machines
from megarl.errors import pluralize
from megarl.hf.shape import model_shape
from megarl.platform.device_table import Device
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

_MOST_TRAINER = 0.7  # of the device, for the lower bound of a trainer's memory: activations and libraries come on top
_MOST_TIGHT = 0.9  # the same, if no layout leaves that much: `plan` counts exactly whether the rest is enough
_TIGHT_MARGIN = 0.02  # of the device: layouts that differ by less count as equally small
_MOST_ENGINE = 0.45  # of the device, for an engine's weights: the rest is for its cache, and for what trainers keep
_WEIGHT_BYTES = 2  # bfloat16
_STATE_BYTES = 18  # per trained parameter: weights 2, gradients 4, master weights and moments 12


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
    recipe = load_recipe(recipe_file, settings, check=False)
    best = _best(recipe, model, device)
    if best is None:
        return guess, _no_room(recipe, model, device, None)
    layout = guess | _changes(recipe, best.recipe)
    if not best.fits:
        return layout, _no_room(recipe, model, device, best)
    if best.peak <= _MOST_TRAINER:
        return layout, None
    return layout, (
        f"memory is tight: this layout, one of the smallest, takes at least {best.peak:.0%} of each {device.name} before most "
        "activations. `megarl plan` counts the rest"
    )


class _Candidate(NamedTuple):
    """A recipe with a layout, and lower bounds of its memory, as shares of the device."""

    recipe: Recipe
    peak: float  # of a trainer
    engine: float  # an engine's weights; 0: nothing is sampled

    @property
    def fits(self) -> bool:
        return self.peak <= _MOST_TIGHT and self.engine <= _MOST_ENGINE


def _best(recipe: Recipe, model: dict[str, Any], device: Device) -> _Candidate | None:
    """Return the fastest layout by estimate that leaves room, else the fastest of the smallest ones that fit.

    If none fits, the smallest one; None: no layout divides the model.
    """
    from megarl.commands.plan.search import layouts as space
    from megarl.commands.plan.search.fits import Subject
    from megarl.commands.plan.search.lower_bound import min_peak_bytes
    from megarl.commands.plan.search.needed import engine_weights

    subject = Subject(recipe, model, None, device)
    shares = {
        engines: engine_weights(subject, engines) / subject.limit if recipe.train.source == "rollout" else 0.0
        for engines in space.engine_layouts(recipe, model, device.per_node)
    }
    if not shares:
        return None
    fitting = [engines for engines, share in shares.items() if share <= _MOST_ENGINE]
    if fitting:
        engines = min(fitting, key=lambda each: (each.data_parallel, each.tensor_parallel))
    else:
        engines = min(shares, key=lambda each: (shares[each], each.data_parallel, each.tensor_parallel))
    candidates = []
    for layout in space.layouts(recipe, model, device.per_node):
        if layout.virtual_pipeline is None:
            candidate = space.apply_choice(recipe, replace(space.choice_of(recipe), layout=layout, engines=engines))
            peak = min_peak_bytes(candidate, subject.shape) / subject.limit
            candidates.append(_Candidate(candidate, peak, shares[engines]))
    candidates.sort(key=lambda each: each.peak)

    def is_valid(candidate: _Candidate) -> bool:
        return space.refusal(candidate.recipe, model) is None

    smallest = next(filter(is_valid, candidates), None)
    if smallest is None or not smallest.fits:
        return smallest
    most = min(_MOST_TIGHT, max(_MOST_TRAINER, smallest.peak + _TIGHT_MARGIN))
    near = [each for each in candidates if each.peak <= most]
    near.sort(key=lambda each: subject.step_seconds(each.recipe))
    return next(filter(is_valid, near))  # checks cost more than estimates


def _no_room(recipe: Recipe, model: dict[str, Any], device: Device, smallest: _Candidate | None) -> str:
    """Return the notice that no layout fits: what the model needs, and what the written layout is."""
    total, devices, limit = model_shape(model).total, recipe.cluster.trainers, device.memory * 2**30
    state = _STATE_BYTES * total
    nodes = math.ceil(state / (_MOST_TIGHT * limit) / device.per_node)
    text = (
        f"no layout fits {pluralize(devices, 'device')} by arithmetic: weights, gradients and optimizer states of "
        f"{total / 1e9:.1f} billion parameters take {state / 2**30:,.0f} GiB"
    )
    if nodes * device.per_node > devices:
        text += f", at least {nodes} x {device.per_node} {device.name}"
    if recipe.train.source == "rollout":
        spread = math.ceil(_WEIGHT_BYTES * total / (_MOST_ENGINE * limit))
        text += f"; an engine, or a group of engines with experts, needs at least {pluralize(spread, 'device')} for weights and cache"
    if smallest is not None:
        text += f". The recipe has the smallest layout, which takes at least {smallest.peak:.0%} of each device for training"
        text += f" and {smallest.engine:.0%} for an engine's weights" if smallest.engine else ""
    return f"{text}. Use more devices, or a smaller model. Not tried: optimizer states outside the devices (docs/supported_recipes.md)"


def _changes(recipe: Recipe, candidate: Recipe) -> dict[str, Any]:
    """Return the settings of `candidate` that differ from the recipe's, by dotted key."""
    from megarl.commands.plan.search.layouts import VARIED

    def value(owner: Recipe, key: str) -> Any:
        section, field = key.split(".")
        return getattr(getattr(owner, section), field)

    return {key: value(candidate, key) for key in VARIED if value(candidate, key) != value(recipe, key)}
