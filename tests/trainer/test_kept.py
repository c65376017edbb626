"""Decision about trainers that have outlived their controller (`train.keep_workers`), and the settings that must be equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.preflight.recipe.train import keep_workers_errors
from megarl.recipe.schema import Recipe
from megarl.trainer.kept import Way, settings_digest, way_to_weights
from megarl.trainer.worker import Worker


@pytest.mark.parametrize(
    ("held", "step", "has_checkpoint", "refreshes", "way"),
    [
        ([7, 7, 7], 7, True, False, Way.GO_ON),
        ([7, 7, 7], 7, False, True, Way.GO_ON),
        ([0], 0, False, False, Way.GO_ON),  # it died before the first update
        ([None, None], 7, True, False, Way.LOAD),  # an update ahead, or amid an update
        ([8, 8], 7, True, False, Way.LOAD),  # the journal of step 8 was not written
        ([7, None], 7, True, False, Way.LOAD),
        ([7, 0], 7, True, False, Way.LOAD),  # the critic has started again
        ([6, 6], 7, True, False, Way.LOAD),
        ([None, None], 7, False, False, Way.START),  # the starting model is read at a start only
        ([None, None], 7, True, True, Way.START),  # a later reference policy would stay
        ([7, 0], 0, False, False, Way.START),
    ],
)
def test_the_way_to_the_weights(
    held: list[int | None], step: int, has_checkpoint: bool, refreshes: bool, way: Way
) -> None:
    assert way_to_weights(held, step, has_checkpoint=has_checkpoint, refreshes_reference=refreshes) is way


def test_a_rank_holds_no_weights_that_have_changed() -> None:
    rank: Any = Worker.__new__(Worker)
    rank.trainer = SimpleNamespace(step=4, load=lambda folder: None)
    rank.check_weights, rank.save, rank._held = lambda event: None, None, (0, 0)
    assert rank.held_step() is None
    rank.hold(2)
    assert rank.held_step() == 2
    rank.trainer.step += 1  # an update
    assert rank.held_step() is None
    rank.hold(3)
    rank.load("checkpoint")  # with the same number of optimizer steps
    assert rank.held_step() is None
    ended: list[bool] = []
    rank.save = SimpleNamespace(abandon=lambda: ended.append(True))
    rank.hold(4)
    assert rank.held_step() == 4 and ended, "its save has ended"


def test_settings_that_must_be_equal() -> None:
    recipe, other = kept(), kept()
    other.train.resume = "auto"
    assert settings_digest(recipe, "worker") == settings_digest(other, "worker") != ""
    assert settings_digest(recipe, "worker") != settings_digest(recipe, "other worker")
    other.actor.optimizer.lr *= 2
    assert settings_digest(recipe, "worker") != settings_digest(other, "worker")
    assert settings_digest(Recipe(), "worker") == ""


def kept() -> Recipe:
    recipe = Recipe()
    recipe.train.keep_workers, recipe.train.restarts, recipe.train.journal = 60.0, 3, True
    recipe.cluster.placement = "disaggregated"
    return recipe


def problems(recipe: Recipe) -> list[str]:
    return [str(error) for error in keep_workers_errors(recipe)]


def test_recipes_that_cannot_keep_workers() -> None:
    assert problems(kept()) == problems(Recipe()) == []
    recipe = kept()
    recipe.train.restarts, recipe.train.journal = 0, False
    assert len(problems(recipe)) == 1 and "train.restarts and train.journal are not set" in problems(recipe)[0]
    recipe = kept()
    recipe.cluster.transport, recipe.cluster.placement = "torchrun", "colocated"
    assert ["torchrun" in text for text in problems(recipe)] == [True, False]
    recipe = kept()
    recipe.megatron.offload = True
    assert "set megatron.offload=false" in problems(recipe)[0]
    recipe.megatron.offload, recipe.critic.megatron.offload = None, True
    assert problems(recipe) == []  # it has no critic
    recipe.algorithm.advantage = "gae"
    assert "set critic.megatron.offload=false" in problems(recipe)[0]
