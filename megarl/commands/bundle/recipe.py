"""The recipe in a bundle: its paths are relative to the bundle, and it lacks the settings that usually contain secrets.

Names and places of settings decide, not their values, so a secret elsewhere in the recipe is packed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.commands.bundle.contents import RECORDED
from megarl.recipe.environment import EnvironmentConfig
from megarl.recipe.observe import AlertsConfig, OtlpConfig
from megarl.recipe.paths import with_paths
from megarl.recipe.schema import Recipe
from megarl.recipe.urls import names_secret

_URL = re.compile(r"([a-z][a-z0-9+.-]*://)(?:[^/?#]*@)?([^?#]*)", re.IGNORECASE)
_SECTIONS = ("rollout", "judge", "teacher")  # with arguments of an engine


def bundled_recipe(recipe: Recipe, names: Mapping[str, str]) -> tuple[Recipe, list[str]]:
    """Return the recipe of a bundle, and texts about what was left out. `names`: of files and folders, by their path.

    Left out are the values of environment variables; arguments of engines with a secret's name (`hf_token`), at any depth;
    arguments of the programs of MCP servers; name, password and query of URLs; trackers; alerts; spans; and settings of the recorded machines
    (`cluster.ray_address`, `weight_sync.directory`, `data.cache`). Other settings are packed as they are.
    """
    left_out = _left_out(recipe)
    mcp = {
        name: dataclasses.replace(server, env={}, command=server.command[:1], url=server.url and _bare(server.url))
        for name, server in recipe.agent.mcp.items()
    }
    remote = dataclasses.replace(recipe.reward.remote, url=recipe.reward.remote.url and _bare(recipe.reward.remote.url))
    engine_args = {
        section: dataclasses.replace(part, engine_args=_without_secrets(part.engine_args))
        for section in _SECTIONS
        for part in [getattr(recipe, section)]
    }
    view = dataclasses.replace(
        recipe,
        name=RECORDED,
        runs_dir=".",
        train=dataclasses.replace(recipe.train, resume="never", replay=None, trainer_restarts=0),
        cluster=dataclasses.replace(recipe.cluster, ray_address=None, environment=EnvironmentConfig()),
        weight_sync=dataclasses.replace(recipe.weight_sync, directory=None),
        data=dataclasses.replace(recipe.data, cache=None),
        agent=dataclasses.replace(recipe.agent, mcp=mcp),
        reward=dataclasses.replace(recipe.reward, remote=remote),
        observe=dataclasses.replace(
            recipe.observe, trackers=[], alerts=AlertsConfig(), otlp=OtlpConfig(), profile_steps=[]
        ),
        **engine_args,
    )
    return with_paths(view, lambda path: names.get(path, path)), left_out


def _left_out(recipe: Recipe) -> list[str]:
    """Return a text for each setting that a replay may need and that the bundle does not contain."""
    environment = recipe.cluster.environment
    variables = sorted({*environment.all, *environment.trainers, *environment.engines})
    texts = [f"cluster.environment: {', '.join(variables)} (export the ones that change numbers)"] if variables else []
    for section in _SECTIONS:
        for name, value in _named_values(f"{section}.engine_args", getattr(recipe, section).engine_args):
            if names_secret(name.rpartition(".")[2]):
                texts.append(f"{name}: it may be a secret")
            elif isinstance(value, str) and _bare(value) != value:
                texts.append(f"{name}: {_shown(value)}")
            elif isinstance(value, str) and value.startswith("/") and Path(value).exists():
                texts.append(f"{name}: {value}")
    for name, server in recipe.agent.mcp.items():
        program = f"{server.command[0]} without its arguments" if server.command[1:] else "".join(server.command)
        values = f", with {', '.join(server.env)} in its environment" if server.env else ""
        texts.append(f"agent.mcp.{name}: {_shown(server.url) if server.url else program}{values}")
    if recipe.reward.services and recipe.reward.remote.url:
        texts.append(f"reward.remote.url: {_shown(recipe.reward.remote.url)}")
    return texts


def _bare(text: str) -> str:
    """Return a URL without user name, password, query and fragment; other texts unchanged."""
    url = _URL.match(text)
    return text if url is None else "".join(url.groups())


def _shown(url: str) -> str:
    return url if _bare(url) == url else f"{_bare(url)} without its name, password and query"


def _without_secrets(value: Any) -> Any:
    """Return an engine's arguments without the ones named like a secret, at any depth, and with bare URLs."""
    if isinstance(value, dict):
        return {name: _without_secrets(part) for name, part in value.items() if not names_secret(str(name))}
    if isinstance(value, list):
        return [_without_secrets(part) for part in value]
    return _bare(value) if isinstance(value, str) else value


def _named_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested settings with their names, such as `kv_config.url`; one with a secret's name as a whole."""
    if isinstance(value, dict) and not names_secret(name.rpartition(".")[2]):
        for key, part in value.items():
            yield from _named_values(f"{name}.{key}", part)
    elif isinstance(value, list):
        for part in value:
            yield from _named_values(name, part)
    else:
        yield name, value
