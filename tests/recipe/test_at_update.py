"""The rule of an update of the weights that a recipe selects, and the settings that follow from it."""

from __future__ import annotations

import pytest

from megarl.recipe.derived.at_update import (
    is_continuous,
    max_lag,
    update_notice,
    update_rule,
    whole_number,
    window_groups,
)
from megarl.recipe.schema import Recipe


def ahead(staleness: float = 2) -> Recipe:
    recipe = Recipe()
    recipe.cluster.placement, recipe.rollout.max_staleness = "disaggregated", staleness
    recipe.data.prompts_per_step = 8
    return recipe


def test_a_synchronous_run_drains_in_admission_order() -> None:
    recipe = ahead(0)
    assert update_rule(recipe) == "drain" and window_groups(recipe) == 1 and max_lag(recipe) == 0
    assert not is_continuous(recipe) and update_notice(recipe) is None


def test_engines_that_sample_ahead_refresh() -> None:
    recipe = ahead()
    assert update_rule(recipe) == "refresh" and is_continuous(recipe)
    assert window_groups(recipe) == 1 + 8  # 0.3 x 3 x 8 = 7.2 groups, rounded up to a batch
    assert max_lag(recipe) == 2 + 1
    assert "at most 3 versions old" in str(update_notice(recipe))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "deterministic", True),
        ("rollout", "admission", "wave"),
        ("rollout", "engine", "sglang"),
        ("megatron", "routing_replay", "rollout"),
        ("rollout", "at_update", "drain"),
    ],
)
def test_runs_that_drain(section: str, key: str, value: object) -> None:
    recipe = ahead()
    setattr(getattr(recipe, section), key, value)
    assert update_rule(recipe) == "drain" and max_lag(recipe) == 2
    notice = update_notice(recipe)
    if key == "at_update":  # the recipe says so
        assert notice is None
    else:
        assert notice and notice.startswith("rollout.at_update is drain (auto with rollout.max_staleness=2): ")


def test_a_window_of_0_keeps_the_order() -> None:
    recipe = ahead()
    recipe.rollout.window = 0.0
    assert window_groups(recipe) == 1 and max_lag(recipe) == 2


def test_shares_of_groups_are_exact() -> None:
    """0.57 x 100 is 56.99... as a float."""
    assert whole_number(0.57 * 100) == 57 and whole_number(0.579 * 100) == 57


@pytest.mark.parametrize(("window", "batches"), [(0.0, 0), (0.1, 0), (0.2, 1), (0.5, 1), (0.6, 1), (0.7, 2), (1.0, 2)])
def test_a_window_is_whole_batches(window: float, batches: int) -> None:
    """With fewer groups the largest lag would be the same, and trainers would wait more often."""
    recipe = ahead(1)
    recipe.rollout.window = window
    assert window_groups(recipe) == batches * 8 + 1 and max_lag(recipe) == 1 + batches


def test_the_notice_names_the_rule_of_the_recipe() -> None:
    recipe = ahead(1)
    recipe.rollout.at_update = "keep"
    assert update_rule(recipe) == "keep" and "keep their KV cache" in str(update_notice(recipe))


@pytest.mark.parametrize("engines", [1, 2])
def test_a_single_engine_that_finishes_is_noted(engines: int) -> None:
    recipe = ahead()
    recipe.rollout.at_update, recipe.rollout.engines = "finish", engines
    assert ("a single engine samples nothing" in str(update_notice(recipe))) == (engines == 1)
