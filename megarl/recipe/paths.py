"""Convert the paths of a recipe, for example to absolute ones."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from megarl.recipe.schema import Recipe


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, which do not depend on the directory a process starts in."""
    return with_paths(recipe, lambda path: os.path.abspath(os.path.expanduser(path)))


def with_paths(recipe: Recipe, convert: Callable[[str], str]) -> Recipe:
    """Return the recipe with each path replaced by `convert(path)`: models, data, run directories, files of functions."""

    def convert_file(function: str) -> str:
        """Convert the path of `file.py:function` or of a YAML file of tools; other names are unchanged."""
        file, colon, name = function.partition(":")
        return f"{convert(file)}{colon}{name}" if file.endswith((".py", ".yaml", ".yml")) else function

    def convert_or_none(path: str | None) -> str | None:
        return convert(path) if path else None

    data, model, critic, teacher, judge = recipe.data, recipe.model, recipe.critic, recipe.teacher, recipe.judge
    weight_sync, reward = recipe.weight_sync, recipe.reward
    return dataclasses.replace(
        recipe,
        runs_dir=convert(recipe.runs_dir),
        train=dataclasses.replace(recipe.train, replay=convert_or_none(recipe.train.replay)),
        weight_sync=dataclasses.replace(weight_sync, directory=convert_or_none(weight_sync.directory)),
        model=dataclasses.replace(model, path=convert(model.path), tokenizer=convert_or_none(model.tokenizer)),
        agent=dataclasses.replace(recipe.agent, tools=[convert_file(tool) for tool in recipe.agent.tools]),
        critic=dataclasses.replace(critic, model_path=convert_or_none(critic.model_path)),
        teacher=dataclasses.replace(teacher, path=convert_or_none(teacher.path)),
        judge=dataclasses.replace(judge, path=convert_or_none(judge.path)),
        reward=dataclasses.replace(
            reward,
            function=convert_file(reward.function) if reward.function else None,
            functions={convert_file(name): weight for name, weight in reward.functions.items()},
        ),
        data=dataclasses.replace(
            data,
            train_files=[convert(file) for file in data.train_files],
            mix={
                name: dataclasses.replace(part, files=[convert(file) for file in part.files])
                for name, part in data.mix.items()
            },
            eval_files=[convert(file) for file in data.eval_files],
        ),
    )
