"""Checks of `train.restarts`, `train.trainer_restarts` and `train.journal`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.schema import Recipe, TrainConfig

Errors = Iterator[RecipeError]


def restart_errors(recipe: Recipe) -> Errors:
    """Errors of `train.restarts` and `train.trainer_restarts`."""
    for name in ("restarts", "trainer_restarts"):
        value, key = getattr(recipe.train, name), f"train.{name}"
        if value and recipe.train.save_every == 0:
            problem = "a restart continues from the newest checkpoint, and train.save_every = 0 writes none"
            yield RecipeError(key, problem, "set train.save_every, e.g. to 20", value=value)
        if value and recipe.cluster.transport == "torchrun":
            yield RecipeError(
                key,
                "torchrun starts its processes again itself, all together",
                "set it to 0, and torchrun --max-restarts",
                value=value,
            )


def trainer_restart_errors(recipe: Recipe) -> Errors:
    if recipe.train.trainer_restarts and update_rule(recipe) == "finish":
        problem = "with rollout.at_update=finish the weight sync that new trainers open would change the weights of samples that run"
        remedy = "set rollout.at_update=refresh, keep or drain, or leave it out and set train.restarts"
        yield RecipeError("train.trainer_restarts", problem, remedy, value=recipe.train.trainer_restarts)


def journal_errors(train: TrainConfig) -> Errors:
    if not train.journal:
        return
    if train.source != "rollout":
        problem = f"train.source={train.source} samples nothing, and a resume repeats the training since the newest checkpoint"
        yield RecipeError("train.journal", problem, "leave it out, and lower train.save_every", value=True)
    elif train.save_every == 0:
        problem = "it keeps the batches since the newest checkpoint, and train.save_every = 0 writes none"
        yield RecipeError("train.journal", problem, "set train.save_every, e.g. to 20", value=True)
