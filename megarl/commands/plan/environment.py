"""Environment variables of a recipe's processes that follow from recipe and model: for `plan`, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megarl.cluster import trainer_settings
from megarl.commands.plan.count.types import Variable
from megarl.engines import engine_settings
from megarl.engines.specs import first_specs
from megarl.platform.devices import Device
from megarl.platform.environment import RoleSettings
from megarl.platform.kinds import kind_of
from megarl.recipe.environment import variables
from megarl.recipe.schema import Recipe

OF_SHELL = "of this shell; a run that it starts inherits it, and its memory is counted"


def device_kind(recipe: Recipe, device: Device | None) -> str | None:
    """The kind of device that a plan is for, a name of `kinds.py`; None where neither recipe nor plan says."""
    if recipe.cluster.device != "auto":
        return recipe.cluster.device
    return device.kind if device is not None else None


def environment_of(
    recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device | None, shell: Mapping[str, str] | None = None
) -> list[Variable]:
    """Variables that the recipe sets, or that its layout needs; those of a platform's defaults are left out. `models`:
    sections -> config.json.

    Of `shell` (None: this command's) only the size of communicators' buffers counts, since it takes device memory: a run
    that this shell starts inherits it. Raises RecipeError for a variable of the recipe with which processes would be wrong.
    """
    kind = device_kind(recipe, device)
    if kind is None:
        return []
    platform, buffer = kind_of(kind).platform(), kind_of(kind).buffer_variable
    given = (os.environ if shell is None else shell).get(buffer, "") if buffer else ""
    users = {buffer: given} if given.isdecimal() else {}
    settings = [trainer_settings(recipe, platform)]
    for engine, spec in first_specs(recipe, training=True):
        if spec.recipe_section != "rollout" or recipe.train.source == "rollout":
            config = models.get(spec.recipe_section)
            own = platform.engines_env(recipe.train.deterministic)
            settings.append(engine_settings(engine, spec, own, kind, variables(recipe, "engines"), config))
    return list(dict.fromkeys(variable for role in settings for variable in _of_role(role, users)))


def _of_role(settings: RoleSettings, users: Mapping[str, str]) -> list[Variable]:
    """Computed variables with those of the shell, which come first unless the layout needs more."""
    reasons = {name: (value, why) for name, value, why in settings.computed(shell={})}
    found = []
    for name, value, why in settings.computed(users):
        found.append(Variable(settings.role, name, value, why if reasons[name][0] == value else OF_SHELL))
    missing = [name for name in users if name not in reasons]
    return found + [Variable(settings.role, name, users[name], OF_SHELL) for name in missing]
