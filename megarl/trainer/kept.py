"""Trainers that have outlived their controller (`train.keep_workers`): what the next controller does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from megarl.cluster.keeper import digest_of
from megarl.errors import pluralize
from megarl.recipe import Recipe
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.trainer.group import TrainerGroup


class Way(Enum):
    """Way in which trainers come to the weights after the last step of an earlier controller."""

    GO_ON = "they hold them"
    LOAD = "they load the newest checkpoint"
    START = "new processes start"


def way_to_weights(held: Sequence[int | None], step: int, *, has_checkpoint: bool, refreshes_reference: bool) -> Way:
    """Return how trainers of an earlier controller come to the weights after `step`.

    held: for each rank of actor and critic, the step after which it holds the weights; None: its weights have changed since the
    controller last named one. has_checkpoint: there is one before `step`, or of it. refreshes_reference: trainers may hold a reference
    policy of a later step than the checkpoint, and loading it would not undo that.
    """
    if all(each == step for each in held):
        return Way.GO_ON
    return Way.LOAD if has_checkpoint and not refreshes_reference else Way.START


def judge_kept(
    groups: Sequence[TrainerGroup], algorithm: AlgorithmConfig, step: int, *, has_checkpoint: bool
) -> Way | None:
    """Return how the processes of actor and critic come to the weights after `step`; None if all of them are new.

    Sets `outlived_at` of groups that hold them. has_checkpoint: see `way_to_weights`.
    """
    if not any(group.workers.kept for group in groups):
        return None
    held = [rank for group in groups for rank in group.held_steps()]
    refreshes = algorithm.refresh_reference_every > 0
    way = way_to_weights(held, step, has_checkpoint=has_checkpoint, refreshes_reference=refreshes)
    for group in groups:
        group.outlived_at = step if way is Way.GO_ON else None
    return way


def settings_digest(recipe: Recipe, *more: object) -> str:
    """Return the digest of the settings of a worker that may outlive its controller; "" if the recipe keeps none.

    `train.resume` differs between the first start and the others, and workers do not read it.
    """
    if not recipe.train.keep_workers:
        return ""
    return digest_of(replace(recipe, train=replace(recipe.train, resume="")), *more)


def not_taken_text(reasons: Sequence[str], engines: Sequence[bool]) -> str:
    """Return the warning that workers of a dead controller do not go on. engines: which of them do."""
    text = f"Workers of the previous controller that cannot go on, and start again: {'; '.join(reasons)}"
    return f"{text}. {sum(engines)} of {pluralize(len(engines), 'engine')} go on" if engines else text
