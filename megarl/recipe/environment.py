"""The recipe's section `cluster.environment`: environment variables of trainers and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megarl.recipe.key import key

Role = Literal["trainers", "engines"]


@dataclass
class EnvironmentConfig:
    """Environment variables of the run's processes. They override megarl's defaults; variables of the command's
    shell override both. If a process needs another value, a value here is an error, and a value of the shell is
    overridden with a notice."""

    all: dict[str, Any] = key({}, "Variables of trainers and engines, e.g. {NAME: value}.")
    trainers: dict[str, Any] = key({}, "Variables of trainers only (actor and critic). They override `all`.")
    engines: dict[str, Any] = key({}, "Variables of engines only. They override `all`.")


def variables(environment: EnvironmentConfig, role: Role) -> dict[str, str]:
    """Return the recipe's variables for the processes of `role`, as text."""
    return {name: str(value) for name, value in {**environment.all, **getattr(environment, role)}.items()}
