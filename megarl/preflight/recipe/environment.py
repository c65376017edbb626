"""Checks of `cluster.environment`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megarl.errors import RecipeError
from megarl.platform.kinds import KINDS
from megarl.recipe.environment import EnvironmentConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)(_|$)", re.IGNORECASE
)
# Variables that megarl sets for each process, with the key that determines them ("" without a key).
_OWNED = {
    "OMP_NUM_THREADS": "cluster.threads",
    "RANK": "", "WORLD_SIZE": "cluster.trainers", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": "",
    "RAY_ADDRESS": "cluster.ray_address",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "",
}  # fmt: skip
_VISIBLE = {kind.visible: "" for kind in KINDS if kind.visible}


def environment_errors(environment: EnvironmentConfig) -> Iterator[RecipeError]:
    for section in ("all", "trainers", "engines"):
        for name, value in getattr(environment, section).items():
            yield from _variable_errors(f"cluster.environment.{section}.{name}", str(name), value)


def _variable_errors(path: str, name: str, value: Any) -> Iterator[RecipeError]:
    """Yield an error for a variable that megarl cannot or must not set."""
    owner = {**_OWNED, **_VISIBLE}.get(name)
    if not _NAME.fullmatch(name):
        problem = "an environment variable cannot have this name"
        yield RecipeError(path, problem, "use letters, digits and _", value=value)
    elif _SECRET.search(name):  # the message does not show the value
        problem = "the name suggests a secret, and the recipe is written to the run's directory"
        remedy = "leave it out of the recipe, and export the variable on every node before Ray or torchrun starts"
        yield RecipeError(path, problem, remedy)
    elif owner is not None:
        remedy = f"set {owner}" if owner else "leave it out"
        yield RecipeError(path, "megarl sets it for each process", remedy, value=value)
    elif isinstance(value, bool) or not isinstance(value, (str, int)):
        problem = "a variable must be text or an integer"
        yield RecipeError(path, problem, f"quote it: '{value}'", value=value)
    elif "\0" in str(value) or "\n" in str(value):
        yield RecipeError(path, "a variable must be a single line", "remove the line break", value=value)
