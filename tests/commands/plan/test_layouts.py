"""Layouts of a search: exactly the layouts that the checks of a run accept."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.plan.search.layouts import (
    Choice,
    EngineLayout,
    TrainerLayout,
    apply_choice,
    choice_of,
    divisors,
    engine_layouts,
    layouts,
    overrides,
    refusal,
    sizes_of_micro_batches,
)
from megarl.commands.plan.search.lower_bound import StagePart, chunks_in_flight, largest_parts
from megarl.hf import published
from megarl.hf.shape import model_shape
from megarl.megatron.layout import check_layout
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe
from tests.support.layout_search import DENSE, SPARSE, recipe

ROOT = Path(__file__).parents[3]


def brute_force(recipe: Recipe, model: dict[str, Any], per_node: int) -> set[TrainerLayout]:
    """Every layout with even stages that passes `check_layout`."""
    sizes = range(1, recipe.cluster.trainers + 1)
    accepted = set()
    for tensor, pipeline, context, expert, within in product(sizes, repeat=5):
        if tensor > per_node or tensor * pipeline * context > recipe.cluster.trainers:
            continue
        for chunks in (None, 2, 3, 4, 5, 6):
            layout = TrainerLayout(tensor, pipeline, context, expert, within, chunks)
            megatron = apply_choice(recipe, replace(choice_of(recipe), layout=layout)).megatron
            try:
                check_layout(model, megatron, recipe.cluster.trainers)
            except ValueError:
                continue
            accepted.add(layout)
    return accepted


@pytest.mark.parametrize(("model", "trainers"), [(DENSE, 4), (DENSE, 6), (SPARSE, 4), (SPARSE, 6), (SPARSE, 5)])
def test_every_layout_that_divides_is_listed(model: dict[str, Any], trainers: int) -> None:
    run_recipe = recipe(trainers)
    listed = list(layouts(run_recipe, model, 2))
    assert len(set(listed)) == len(listed)
    even = {layout for layout in listed if layout.first_stage_layers is None}
    assert even == brute_force(run_recipe, model, 2)


@pytest.mark.parametrize(
    ("stages", "first_and_last"),
    [(2, {(None, None)}), (4, {(1, 1), (2, 2)}), (5, {(1, 2), (2, 1)}), (6, {(None, None)})],
)
def test_stages_are_as_even_as_possible(stages: int, first_and_last: set[Any]) -> None:
    matching = [layout for layout in layouts(recipe(stages), DENSE, 8) if layout.pipeline_parallel == stages]
    plain = [layout for layout in matching if layout.virtual_pipeline is None]
    assert {(layout.first_stage_layers, layout.last_stage_layers) for layout in plain} == first_and_last


def test_uneven_stages_of_deepseek_v3_equal_the_published_layout() -> None:
    run_recipe, model = load_recipe(ROOT / "recipes" / "grpo_deepseek_v3.yaml"), published.read("DeepSeek-V3")
    matching = [layout for layout in layouts(run_recipe, model, 16) if layout.pipeline_parallel == 8]
    assert {(layout.first_stage_layers, layout.last_stage_layers) for layout in matching} == {(6, 7), (7, 6)}


def test_two_uneven_stages_are_not_interleaved() -> None:
    """Megatron divides by the layers between the first and the last stage."""
    matching = [layout for layout in layouts(recipe(2), DENSE, 8) if layout.pipeline_parallel == 2]
    assert {layout.virtual_pipeline for layout in matching} == {None, 3}
    with pytest.raises(ValueError, match="cannot interleave without a stage"):
        check_layout(
            DENSE,
            replace(
                apply_choice(recipe(2), choice_of(recipe(2))).megatron,
                pipeline_parallel=2,
                virtual_pipeline=2,
                first_stage_layers=2,
                last_stage_layers=4,
            ),
            2,
        )


def test_the_recipes_layout_is_listed() -> None:
    run_recipe = recipe(8, pipeline_parallel=4, first_stage_layers=3, last_stage_layers=1, tensor_parallel=2)
    assert choice_of(run_recipe).layout in set(layouts(run_recipe, DENSE, 8))


def test_a_tensor_parallel_group_stays_within_one_machine() -> None:
    assert {layout.tensor_parallel for layout in layouts(recipe(4), DENSE, 1)} == {1}


def test_overrides_of_a_choice_reproduce_its_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: {path: x}\nmegatron: {tensor_parallel: 2, sequence_parallel: true, virtual_pipeline: null}\n"
    )
    loaded = load_recipe(file, ["cluster.trainers=4"])
    choice = Choice(TrainerLayout(1, 2, 1, 1, 1, 3), "full", True, 777, EngineLayout(2, 2, 1, None))
    chosen_recipe = apply_choice(loaded, choice)
    settings = overrides(loaded, chosen_recipe)
    assert "megatron.sequence_parallel=null" in settings, "one device cuts no sequences"
    assert "megatron.recompute=full" in settings and "megatron.expert_tensor_parallel=1" not in settings
    assert load_recipe(file, ["cluster.trainers=4", *settings]) == chosen_recipe
    assert overrides(loaded, loaded) == []


def test_micro_batches_hold_a_whole_sequence() -> None:
    run_recipe = recipe(4)
    run_recipe.data.max_prompt_length, run_recipe.rollout.max_response_length = 100, 300
    run_recipe.actor.max_tokens_per_micro_batch = 1000
    assert sizes_of_micro_batches(run_recipe, TrainerLayout(1, 1, 1, 1, 1)) == [400, 800, 1000, 1600, 3200]
    run_recipe.actor.max_tokens_per_micro_batch = 50
    assert sizes_of_micro_batches(run_recipe, TrainerLayout(1, 1, 2, 1, 1)) == [200, 400, 800, 1600]


def test_engine_layouts_use_all_devices() -> None:
    listed = set(engine_layouts(recipe(4), SPARSE, 2))
    assert EngineLayout(4, 1, 1, None) in listed and EngineLayout(2, 2, 1, True) in listed
    assert EngineLayout(2, 2, 2, None) not in listed, "6 experts do not divide over 4 devices"
    assert EngineLayout(2, 1, 2, None) not in listed, "two devices would have nothing to do"
    assert EngineLayout(1, 4, 1, None) not in listed, "a machine has 2"
    apart = recipe(4)
    apart.cluster.placement, apart.rollout.engines = "disaggregated", 2
    assert {engine.engines * engine.tensor_parallel for engine in engine_layouts(apart, DENSE, 8)} == {2}


def test_engine_layouts_that_do_not_divide_the_model_are_not_suggested() -> None:
    """28 attention heads divide by 7, and 4 key/value heads neither divide over 7 devices nor are repeated on them."""
    model = {**DENSE, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 7 * 64}
    run_recipe = recipe(7)
    assert {engine.tensor_parallel for engine in engine_layouts(run_recipe, model, 8)} == {1}
    run_recipe.rollout.engines, run_recipe.rollout.tensor_parallel = 1, 7
    assert "key/value heads" in str(refusal(run_recipe, model))


def test_demonstrations_need_no_engines() -> None:
    run_recipe = recipe(4)
    run_recipe.train.source = "sft"
    assert list(engine_layouts(run_recipe, DENSE, 8)) == [choice_of(run_recipe).engines]


def test_layouts_that_a_run_refuses_are_refused() -> None:
    run_recipe = load_recipe(ROOT / "recipes" / "dapo_qwen3_30b.yaml")
    model = published.read("Qwen3-30B-A3B")
    assert refusal(run_recipe, model) is None
    many = replace(run_recipe, rollout=replace(run_recipe.rollout, engines=5))
    assert "colocated engines can use only the trainers' devices" in str(refusal(many, model))


# --- the stage that has the peak -----------------------------------------------------------------


def test_only_non_dominated_stages_can_have_the_peak() -> None:
    shape = model_shape(SPARSE)
    even = recipe(6, pipeline_parallel=6)
    assert [part.number for part in largest_parts(even.megatron, shape)] == [0, 5]
    uneven = recipe(4, pipeline_parallel=4, first_stage_layers=1, last_stage_layers=1)
    assert [part.number for part in largest_parts(uneven.megatron, shape)] == [0, 1, 3]
    assert StagePart(0, 2, 1, True, False).covers(StagePart(1, 1, 1, False, False))
    assert not StagePart(0, 2, 1, True, False).covers(StagePart(1, 1, 2, False, False)), "another kind of layers"


def test_chunks_in_flight() -> None:
    """Same warm-up as Megatron's schedules: of 4 stages with 2 chunks, the first runs 2 x 3 + 4 + 1 forward passes first."""
    assert [chunks_in_flight(recipe(4, pipeline_parallel=4).megatron, stage) for stage in (0, 3)] == [(4, 1), (1, 1)]
    interleaved = recipe(4, pipeline_parallel=4, virtual_pipeline=2)
    assert [chunks_in_flight(interleaved.megatron, stage) for stage in (0, 3)] == [(11, 2), (5, 2)]


def test_divisors_of_a_number_beyond_any_cluster_take_no_time() -> None:
    """A recipe with a typing error in cluster.trainers asks for them before its bound is reported."""
    assert all(divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0) for n in range(1, 400))
    assert len(divisors(10**9)) == 100
