"""Engines that hold a model's weights, and the devices that a model needs, by arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.commands.plan.preflight import checked, require
from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.layouts import EngineLayout
from megarl.commands.plan.search.needed import (
    engine_needed,
    engine_weights,
    engines_that_hold,
    shortage,
    trainers_needed,
)
from megarl.commands.plan.search.search import fastest_engines, subject_of
from megarl.commands.plan.search.suggest import uncounted_layouts, with_suggestions
from megarl.errors import InputError
from megarl.hf import published
from megarl.platform.device_table import device_named
from megarl.preflight.load import load_recipe

DEEPSEEK = Path(__file__).parents[3] / "recipes" / "grpo_deepseek_v3.yaml"
BOX16 = replace(device_named("910B"), per_node=16)
GIB = 2**30


def deepseek(trainers: int, *settings: str) -> Subject:
    recipe = load_recipe(DEEPSEEK, [f"cluster.trainers={trainers}", *settings], check=False)
    return subject_of(recipe, {"rollout": published.read("DeepSeek-V3")}, BOX16)


def test_weights_of_an_engine() -> None:
    """The bound is below the counted weights (docs/planner.md: 671.03 and 12.91 billion parameters), and close."""
    task = deepseek(256)
    assert engine_weights(task, EngineLayout(1, 1, 1, None)) == pytest.approx(2 * 671.03e9, rel=1e-3)
    assert 0.75 < engine_weights(task, EngineLayout(128, 2, 128, None)) / (2 * 12.91e9) <= 1
    quantized = deepseek(256, "rollout.quantization=fp8")
    assert engine_weights(quantized, EngineLayout(1, 1, 1, None)) == pytest.approx(671.03e9, rel=1e-3)


def test_proposed_engines_hold_the_weights() -> None:
    """At TP 1 without a group, DeepSeek-V3 would need 1.25 TiB of a device."""
    task = deepseek(64)
    lines = uncounted_layouts(task)
    assert lines and all("rollout.engines=32 rollout.data_parallel=32" in line for line in lines), lines
    assert not any("rollout.tensor_parallel=1 " in f"{line} " for line in lines)
    for engines in (*engines_that_hold(task), *fastest_engines(task)):
        assert engine_weights(task, engines) < 0.8 * 64 * GIB


def test_a_recipe_without_sufficient_devices_is_told_how_many_are_needed() -> None:
    task = deepseek(16)
    assert (trainers_needed(task), engine_needed(task)) == (64, 32)
    text = shortage(task)
    assert text is not None and "trainers need about 64 (cluster.trainers is 16)" in text
    assert re.search(r"group of engines .* needs about 32 for its weights alone .* engines have 16\)", text)
    for propose in (uncounted_layouts, fastest_engines, engines_that_hold):
        with pytest.raises(InputError, match=r"No engine layout on these devices has room .* about 32"):
            propose(task)
    assert shortage(deepseek(256)) is None


def test_the_devices_of_the_recipe_are_tried() -> None:
    """40 devices are between the numbers that are tried for every recipe, 32 and 48."""
    device = replace(device_named("910B"), per_node=8, memory=6)
    models = {"rollout": published.read("Qwen3-32B")}
    needed = {
        task.recipe.cluster.trainers: trainers_needed(task)
        for task in (subject_of(deepseek(number).recipe, models, device) for number in (16, 40))
    }
    assert needed == {16: 48, 40: 40}


@pytest.mark.slow
def test_engines_are_bounded_by_the_largest_number_of_devices() -> None:
    task = deepseek(16)
    models = {"rollout": published.read("DeepSeek-V3")}
    small, smaller = (subject_of(task.recipe, models, replace(BOX16, memory=memory)) for memory in (2.9, 2.7))
    assert (engine_needed(small), engine_needed(smaller)) == (4096, None)
    text = shortage(smaller)
    assert text is not None and "needs more than 4,096 for its weights" in text


def test_the_error_of_a_layout_names_the_devices_that_are_needed() -> None:
    settings = ["cluster.trainers=16"]
    with pytest.raises(InputError) as raised, with_suggestions(DEEPSEEK, settings, None, BOX16):
        require(checked(load_recipe(DEEPSEEK, settings), DEEPSEEK), strict=False)
    assert "rollout.engines" in str(raised.value) and "about 32" in str(raised.value)
    assert "divides" not in str(raised.value)
