"""Make the relative paths of a recipe absolute."""

from __future__ import annotations

import dataclasses
import os

from megarl.recipe.schema import Recipe


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, which do not depend on the directory a process starts in."""

    def absolute(path: str) -> str:
        return os.path.abspath(os.path.expanduser(path))

    def absolute_file(function: str) -> str:
        """`file.py:function` with an absolute path; other names are unchanged."""
        file, colon, name = function.partition(":")
        return f"{absolute(file)}{colon}{name}" if file.endswith(".py") else function

    def absolute_or_none(path: str | None) -> str | None:
        return absolute(path) if path else None

    data, model, critic, teacher, judge = recipe.data, recipe.model, recipe.critic, recipe.teacher, recipe.judge
    weight_sync, reward = recipe.weight_sync, recipe.reward
    return dataclasses.replace(
        recipe,
        runs_dir=absolute(recipe.runs_dir),
        train=dataclasses.replace(recipe.train, replay=absolute_or_none(recipe.train.replay)),
        weight_sync=dataclasses.replace(weight_sync, directory=absolute_or_none(weight_sync.directory)),
        model=dataclasses.replace(model, path=absolute(model.path), tokenizer=absolute_or_none(model.tokenizer)),
        critic=dataclasses.replace(critic, model_path=absolute_or_none(critic.model_path)),
        teacher=dataclasses.replace(teacher, path=absolute_or_none(teacher.path)),
        judge=dataclasses.replace(judge, path=absolute_or_none(judge.path)),
        reward=dataclasses.replace(
            reward,
            function=absolute_file(reward.function) if reward.function else None,
            functions={absolute_file(name): weight for name, weight in reward.functions.items()},
        ),
        data=dataclasses.replace(
            data,
            train_files=[absolute(file) for file in data.train_files],
            mix={
                name: dataclasses.replace(part, files=[absolute(file) for file in part.files])
                for name, part in data.mix.items()
            },
            eval_files=[absolute(file) for file in data.eval_files],
        ),
    )
