"""The recipe's section `cluster.environment`: environment variables of trainers and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megarl.recipe.key import key

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe

Role = Literal["trainers", "engines"]


@dataclass
class EnvironmentConfig:
    """Environment variables of the run's processes. They replace megarl's defaults; the shell of the command comes before
    both. A value with which a process would be wrong is refused, one of the shell overruled with a notice."""

    all: dict[str, Any] = key({}, "Variables of trainers and engines, e.g. {NAME: value}.")
    trainers: dict[str, Any] = key({}, "Variables of trainers (actor and critic) alone, before those of `all`.")
    engines: dict[str, Any] = key({}, "Variables of engines alone, before those of `all`.")


def variables(recipe: Recipe, role: Role) -> dict[str, str]:
    """Return the recipe's variables for the processes of `role`, as text."""
    section = recipe.cluster.environment
    return {name: str(value) for name, value in {**section.all, **getattr(section, role)}.items()}
