"""Environment variables of a recipe's processes that follow from recipe and model: for `plan`, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.cluster import trainer_settings
from megarl.config.environment import variables
from megarl.config.schema import Recipe
from megarl.engines import engine_settings
from megarl.engines.specs import first_specs
from megarl.planner.plan import Variable
from megarl.platform.devices import Device
from megarl.platform.kinds import kind_of


def device_kind(recipe: Recipe, device: Device | None) -> str | None:
    """The kind of device that a plan is for, a name of `kinds.py`; None where neither recipe nor plan says."""
    if recipe.cluster.device != "auto":
        return recipe.cluster.device
    return device.kind if device is not None else None


def environment_of(recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device | None) -> list[Variable]:
    """Variables that the recipe sets, or that its layout needs; those of a platform's defaults are left out. `models`:
    sections -> config.json. The shell of this command is not the run's, and does not count. Raises RecipeError for a variable
    of the recipe with which processes would be wrong."""
    kind = device_kind(recipe, device)
    if kind is None:
        return []
    platform = kind_of(kind).platform()
    settings = [trainer_settings(recipe, platform)]
    for engine, spec in first_specs(recipe, training=True):
        if spec.recipe_section != "rollout" or recipe.train.source == "rollout":
            config = models.get(spec.recipe_section)
            own = platform.engines_env(recipe.train.deterministic)
            settings.append(engine_settings(engine, spec, own, kind, variables(recipe, "engines"), config))
    found = [Variable(role.role, *variable) for role in settings for variable in role.computed(users={})]
    return list(dict.fromkeys(found))
