"""`plan --search`, and what `plan` proposes for a layout that does not divide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.layouts import choice_of, chosen, engine_layouts, layouts, overrides, refusal
from megarl.commands.plan.search.search import search
from megarl.commands.plan.search.suggest import untried
from megarl.commands.plan.show.search_console import as_json as json_of
from megarl.commands.plan.show.search_console import show
from megarl.errors import InputError, RecipeError, as_input_error
from megarl.platform.devices import Device
from megarl.preflight.load import load_recipe
from megarl.preflight.models import POLICY, config_of
from megarl.recipe.schema import Recipe


def search_layouts(
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device | None,
    *,
    response: float | None,
    seconds: float,
    as_json: bool,
) -> int:
    """Print the best. `models`: of `make_plan`. 1 where none was found."""
    subject = subject_of(recipe, models, known(device), response)
    with as_input_error():
        found = search(subject, seconds=seconds)
        if as_json:
            print(json_of(subject, found))
        else:
            show(subject, found)
    return int(not found.best)


def known(device: Device | None) -> Device:
    if device is None:
        raise InputError(
            "--search looks for what fits a device: give --device, e.g. 910B or H100 (the recipe's head names none)."
        )
    return device


def subject_of(
    recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device, response: float | None = None
) -> Subject:
    critic = models.get("critic", models["rollout"]) if uses_critic(recipe.algorithm) else None
    return Subject(recipe, models["rollout"], critic, device, response)


def to_lay_out(path: Path, given: Sequence[str], model: str | None, device: Device) -> tuple[Recipe, Recipe]:
    """The recipe, whose layout may be one that is refused; and the same in one that is not, to check all else of it."""
    recipe = load_recipe(path, given, check=False)
    other = _laid_out(recipe, config_of(recipe.model.path, path, POLICY, model), device)
    load_recipe(path, [*given, *overrides(recipe, other)])  # what else is wrong with it
    return recipe, other


@contextlib.contextmanager
def proposing(path: Path, given: Sequence[str], model: str | None, device: Device | None) -> Iterator[None]:
    """Adds layouts that divide to what is raised in here, where the recipe's layout is to blame."""
    try:
        yield
    except (RecipeError, InputError) as error:
        found = [] if device is None else _instead(path, given, model, device)
        if not found:
            raise
        lines = "".join(f"\n  divides   {line}" for line in found)
        lines += "\n  Of these no memory was counted: plan them, or look for more with --search."
        raise InputError(f"{error}{lines}") from error


def _instead(path: Path, given: Sequence[str], model: str | None, device: Device) -> list[str]:
    try:
        recipe = load_recipe(path, given, check=False)
        config = config_of(recipe.model.path, path, POLICY, model)
        to_blame = refusal(recipe, config) and not refusal(_laid_out(recipe, config, device), config)
        return untried(subject_of(recipe, {"rollout": config}, device)) if to_blame else []
    except ValueError:
        return []  # something else is wrong as well, and the first error says what to do


def _laid_out(recipe: Recipe, model: dict[str, Any], device: Device) -> Recipe:
    """In the first layout that divides, with its own engines where there can be such."""
    own = choice_of(recipe)
    layout = next(layouts(recipe, model, device.per_node), own.layout)
    engines = next(engine_layouts(recipe, model, device.per_node), own.engines)
    return chosen(recipe, replace(own, layout=layout, engines=engines))
