"""`plan --search`, and suggestions for a layout that does not divide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.layouts import apply_choice, choice_of, engine_layouts, layouts, overrides, refusal
from megarl.commands.plan.search.suggest import uncounted_layouts
from megarl.errors import InputError, RecipeError
from megarl.platform.devices import Device
from megarl.preflight.load import load_recipe
from megarl.preflight.models import POLICY, config_of
from megarl.recipe.schema import Recipe


def require_device(device: Device | None) -> Device:
    if device is None:
        raise InputError("--search needs a device: give --device, e.g. 910B or H100 (the recipe's head names none).")
    return device


def subject_of(
    recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device, response: float | None = None
) -> Subject:
    critic = models.get("critic", models["rollout"]) if uses_critic(recipe.algorithm) else None
    return Subject(recipe, models["rollout"], critic, device, response)


def load_for_search(path: Path, settings: Sequence[str], model: str | None, device: Device) -> tuple[Recipe, Recipe]:
    """Return the recipe, even if its layout would be refused, and the recipe with a valid layout, to check the rest."""
    recipe = load_recipe(path, settings, check=False)
    other = _laid_out(recipe, config_of(recipe.model.path, path, POLICY, model), device)
    load_recipe(path, [*settings, *overrides(recipe, other)])  # raises for every other fault
    return recipe, other


@contextlib.contextmanager
def with_suggestions(path: Path, settings: Sequence[str], model: str | None, device: Device | None) -> Iterator[None]:
    """Add layouts that divide to an error inside the block, if the recipe's layout caused it."""
    try:
        yield
    except (RecipeError, InputError) as error:
        suggestions = [] if device is None else _instead(path, settings, model, device)
        if not suggestions:
            raise
        lines = "".join(f"\n  divides   {line}" for line in suggestions)
        lines += "\n  Their memory was not counted: plan them, or search for more with --search."
        raise InputError(f"{error}{lines}") from error


def _instead(path: Path, settings: Sequence[str], model: str | None, device: Device) -> list[str]:
    try:
        recipe = load_recipe(path, settings, check=False)
        config = config_of(recipe.model.path, path, POLICY, model)
        to_blame = refusal(recipe, config) and not refusal(_laid_out(recipe, config, device), config)
        return uncounted_layouts(subject_of(recipe, {"rollout": config}, device)) if to_blame else []
    except ValueError:
        return []  # there is another fault, and the original error names it


def _laid_out(recipe: Recipe, model: dict[str, Any], device: Device) -> Recipe:
    """Return the recipe with the first layout that divides, and with its engines if they are valid."""
    choice = choice_of(recipe)
    layout = next(layouts(recipe, model, device.per_node), choice.layout)
    engines = next(engine_layouts(recipe, model, device.per_node), choice.engines)
    return apply_choice(recipe, replace(choice, layout=layout, engines=engines))
