"""Checks of `cluster.environment`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from megarl.errors import RecipeError
from megarl.platform.kinds import KINDS

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)(_|$)", re.IGNORECASE
)


# Variables that megarl sets for each process, and the key that decides them ("": none does).
_OWNED = {
    "OMP_NUM_THREADS": "cluster.threads",
    "RANK": "", "WORLD_SIZE": "cluster.trainers", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": "",
    "RAY_ADDRESS": "cluster.ray_address",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "",
}  # fmt: skip


_VISIBLE = {kind.visible: "" for kind in KINDS if kind.visible}


def check_environment(recipe: Recipe) -> None:
    """Raise RecipeError for names and values that no process could be given."""
    for section in ("all", "trainers", "engines"):
        for name, value in getattr(recipe.cluster.environment, section).items():
            _check(f"cluster.environment.{section}.{name}", str(name), value)


def _check(path: str, name: str, value: Any) -> None:
    if not _NAME.fullmatch(name):
        raise RecipeError(path, "this is no name of a variable", "use letters, digits and _", value=value)
    if _SECRET.search(name):
        raise RecipeError(
            path,
            "this looks like a secret, and a recipe is written into the run's directory",
            "leave it out of the recipe, and export the variable on every node before Ray or torchrun starts",
        )
    owner = {**_OWNED, **_VISIBLE}.get(name)
    if owner is not None:
        raise RecipeError(
            path, "megarl sets it for each process", f"set {owner}" if owner else "leave it out", value=value
        )
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise RecipeError(path, "a variable is a text or a whole number", f"quote it: '{value}'", value=value)
    if "\0" in str(value) or "\n" in str(value):
        raise RecipeError(path, "a variable has one line", "leave the line break out", value=value)
