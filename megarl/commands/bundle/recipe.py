"""The recipe in a bundle: its paths are relative to the bundle, and it contains no secret."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.commands.bundle.contents import RECORDED
from megarl.recipe.environment import EnvironmentConfig
from megarl.recipe.paths import with_paths
from megarl.recipe.schema import Recipe

_SECRET = re.compile(r"token$|secret|password|api_?key|credential", re.IGNORECASE)


def bundled_recipe(recipe: Recipe, names: Mapping[str, str]) -> tuple[Recipe, list[str]]:
    """Return the recipe of a bundle, and texts about what was left out. `names`: of files and folders, by their path.

    Left out are the values of environment variables, arguments of engines with a secret's name (`hf_token`), trackers, and
    settings of the recorded machines (`cluster.ray_address`, `weight_sync.directory`, `data.cache`).
    """
    left_out = _left_out(recipe)
    mcp = {name: dataclasses.replace(server, env={}) for name, server in recipe.agent.mcp.items()}
    engine_args = {
        section: dataclasses.replace(getattr(recipe, section), engine_args=_without_secrets(recipe, section))
        for section in ("rollout", "judge", "teacher")
    }
    view = dataclasses.replace(
        recipe,
        name=RECORDED,
        runs_dir=".",
        train=dataclasses.replace(recipe.train, resume="never", replay=None),
        cluster=dataclasses.replace(recipe.cluster, ray_address=None, environment=EnvironmentConfig()),
        weight_sync=dataclasses.replace(recipe.weight_sync, directory=None),
        data=dataclasses.replace(recipe.data, cache=None),
        agent=dataclasses.replace(recipe.agent, mcp=mcp),
        observe=dataclasses.replace(recipe.observe, trackers=[], profile_steps=[]),
        **engine_args,
    )
    return with_paths(view, lambda path: names.get(path, path)), left_out


def unpacked_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe of a bundle that is unpacked in `folder`, with absolute paths."""
    return with_paths(recipe, lambda path: str(folder / path))


def _left_out(recipe: Recipe) -> list[str]:
    """Return a text for each setting that a replay may need and that the bundle does not contain."""
    environment = recipe.cluster.environment
    variables = sorted({*environment.all, *environment.trainers, *environment.engines})
    texts = [f"cluster.environment: {', '.join(variables)} (export the ones that change numbers)"] if variables else []
    for section in ("rollout", "judge", "teacher"):
        kept, arguments = _without_secrets(recipe, section), getattr(recipe, section).engine_args
        texts += [f"{section}.engine_args.{name}: it may be a secret" for name in arguments if name not in kept]
        texts += [f"{section}.engine_args.{name}: {path}" for name, path in kept.items() if _is_path(path)]
    for name, server in recipe.agent.mcp.items():
        values = f" with {', '.join(server.env)}" if server.env else ""
        texts.append(f"agent.mcp.{name}: {server.url or ' '.join(server.command)}{values}")
    if recipe.reward.uses_remote:
        texts.append(f"reward.remote.url: {recipe.reward.remote.url}")
    return texts


def _without_secrets(recipe: Recipe, section: str) -> dict[str, Any]:
    arguments = getattr(recipe, section).engine_args
    return {name: value for name, value in arguments.items() if not _SECRET.search(name)}


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and Path(value).exists()
