"""Environment variables that a recipe's processes will get, computed before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megarl.cluster import trainer_settings
from megarl.commands.plan.count.types import Variable
from megarl.engines import engine_settings
from megarl.engines.specs import first_specs
from megarl.platform.device_table import Device
from megarl.platform.environment import RoleSettings
from megarl.platform.kinds import kind_of
from megarl.recipe.environment import variables
from megarl.recipe.schema import ClusterConfig, Recipe

OF_SHELL = "set in this shell; a run started from it inherits the variable, so its memory is counted"


def device_kind(cluster: ClusterConfig, device: Device | None) -> str | None:
    """Return the kind of device of a plan (a name of `kinds.py`); None if neither recipe nor plan has one."""
    if cluster.device != "auto":
        return cluster.device
    return device.kind if device is not None else None


def environment_of(
    recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device | None, shell: Mapping[str, str] | None = None
) -> list[Variable]:
    """Return the variables that the recipe sets or its layout needs, without a platform's defaults.

    `models`: section -> config.json. `shell` (None: os.environ) is read only for the buffer size of communicators, which
    takes device memory: a run started from this shell inherits it. Raises RecipeError for a variable of the recipe that
    breaks its processes.
    """
    kind = device_kind(recipe.cluster, device)
    if kind is None:
        return []
    platform, buffer = kind_of(kind).platform(), kind_of(kind).buffer_variable
    buffer_size = (os.environ if shell is None else shell).get(buffer, "") if buffer else ""
    inherited = {buffer: buffer_size} if buffer_size.isdecimal() else {}
    settings = [trainer_settings(recipe, platform)]
    for engine, spec in first_specs(recipe, training=True):
        config = models.get(spec.recipe_section)
        defaults = platform.engines_env(recipe.train.deterministic)
        settings.append(
            engine_settings(engine, spec, defaults, kind, variables(recipe.cluster.environment, "engines"), config)
        )
    return list(dict.fromkeys(variable for role in settings for variable in _of_role(role, inherited)))


def _of_role(settings: RoleSettings, inherited: Mapping[str, str]) -> list[Variable]:
    """Return computed variables merged with the shell's, which win unless the layout needs more."""
    computed = {name: Variable(settings.role, name, value, why) for name, value, why in settings.computed(inherited)}
    kept = {name: Variable(settings.role, name, value, OF_SHELL) for name, value in inherited.items()}
    return list((kept | computed).values())
