"""The notice of devices that colocated engines do not use."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.commands.plan.preflight import checked
from megarl.preflight.engines_and_devices import unused_devices_notice
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_qwen3_8b.yaml"  # for NPUs
SIXTEEN = ["cluster.trainers=16", "rollout.engines=8", "rollout.tensor_parallel=2"]


def recipe_with(*settings: str) -> Recipe:
    return load_recipe(RECIPE, [*SIXTEEN, *settings], check=False)


@pytest.mark.parametrize(
    ("settings", "unused", "engines"),
    [
        (["rollout.engines=4"], 8, 8),
        (["rollout.engines=7"], 2, 8),
        (["rollout.engines=2", "rollout.tensor_parallel=4"], 8, 4),
        (["rollout.engines=3", "rollout.tensor_parallel=4", "cluster.trainers=18"], 6, 4),
        (["rollout.engines=2", "rollout.data_parallel=2"], 12, 8),
    ],
)
def test_engines_that_could_be_added(settings: list[str], unused: int, engines: int) -> None:
    notice = unused_devices_notice(recipe_with(*settings), accelerated=True)
    assert (
        notice is not None and notice.startswith(f"{unused} of ") and f" rollout.engines={engines} would use" in notice
    )


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["cluster.placement=disaggregated", "rollout.engines=1"],
        ["train.source=sft", "rollout.engines=1"],
        ["rollout.engines=3", "rollout.tensor_parallel=4", "cluster.trainers=15"],
        ["rollout.engines=6", "rollout.data_parallel=3"],  # 4 devices for a group of 6
    ],
)
def test_no_engine_could_be_added(settings: list[str]) -> None:
    assert unused_devices_notice(recipe_with(*settings), accelerated=True) is None


def test_processes_on_cpus_share_the_cores() -> None:
    assert unused_devices_notice(recipe_with("rollout.engines=1"), accelerated=False) is None


def test_a_plan_names_them() -> None:
    result = checked(recipe_with("rollout.engines=4"), RECIPE)
    assert any("8 of 16 devices have no engine" in text for text in result.texts("notice"))
