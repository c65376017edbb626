"""Convert the paths of a recipe, for example to absolute ones."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from megarl.hf import hub
from megarl.recipe.hub_inputs import with_inputs
from megarl.recipe.schema import Recipe


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, which do not depend on the directory a process starts in.

    Names of models on the hub get `hf://` in front.
    """

    def named(_: str, path: str) -> str:
        return path if path.startswith(hub.PREFIX) else str(hub.model_name(path) or path)

    recipe = with_inputs(recipe, named, lambda _, files: files)
    return with_paths(recipe, lambda path: os.path.abspath(os.path.expanduser(path)))


def with_paths(recipe: Recipe, convert: Callable[[str], str]) -> Recipe:
    """Return the recipe with each path replaced by `convert(path)`: models, data, run directories, files of functions.

    Names on the hub (`hf://...`) are not paths and stay as they are.
    """

    def convert_file(function: str) -> str:
        """Convert the path of `file.py:function` or of a YAML file of tools; other names are unchanged."""
        file, colon, name = function.partition(":")
        return f"{convert(file)}{colon}{name}" if file.endswith((".py", ".yaml", ".yml")) else function

    def convert_or_none(path: str | None) -> str | None:
        return convert(path) if path else None

    def convert_model(_: str, path: str) -> str:
        return path if path.startswith(hub.PREFIX) else convert(path)

    def convert_files(_: str, files: list[str]) -> list[str]:
        return [file if file.startswith(hub.PREFIX) else convert(file) for file in files]

    weight_sync, reward = recipe.weight_sync, recipe.reward
    return dataclasses.replace(
        with_inputs(recipe, convert_model, convert_files),
        runs_dir=convert(recipe.runs_dir),
        train=dataclasses.replace(recipe.train, replay=convert_or_none(recipe.train.replay)),
        weight_sync=dataclasses.replace(weight_sync, directory=convert_or_none(weight_sync.directory)),
        agent=dataclasses.replace(
            recipe.agent,
            tools=[convert_file(tool) for tool in recipe.agent.tools],
            interaction=convert_file(recipe.agent.interaction) if recipe.agent.interaction else None,
            loop=convert_file(recipe.agent.loop) if recipe.agent.loop else None,
        ),
        reward=dataclasses.replace(
            reward,
            function=convert_file(reward.function) if reward.function else None,
            functions={convert_file(name): weight for name, weight in reward.functions.items()},
        ),
    )
