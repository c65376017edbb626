"""Estimated seconds of a step: the recipe's phases, their parts, and the changes that must make them faster."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.plan.count.types import Links
from megarl.commands.plan.show.estimate_table import seconds_columns
from megarl.commands.plan.time.estimate import estimate
from megarl.hf import published
from megarl.platform.device_table import device_named
from megarl.preflight.load import load_recipe
from tests.support import plans
from tests.support.estimate_cases import QWEN, rank, recipe

ROOT = Path(__file__).parents[3]


def of(**settings: Any) -> Any:
    return estimate(recipe(**settings), {"rollout": QWEN, "critic": QWEN}, device_named("H100"))


def names(**settings: Any) -> list[str]:
    return [phase.name for phase in of(**settings).phases]


def test_phases_follow_the_recipe() -> None:
    assert names(megatron__offload=False) == ["gen", "old_log_prob", "update_actor", "weight_sync"]
    assert names() == ["gen", "hand_over", "old_log_prob", "update_actor", "weight_sync"]
    assert names(algorithm__kl_coef=0.1)[2:4] == ["old_log_prob", "reference"]
    assert names(algorithm__old_log_probs="current") == ["gen", "hand_over", "update_actor", "weight_sync"]
    stays = {"megatron__offload": False, "critic__megatron__offload": False}
    critic = ["gen", "values", "adv", "update_critic", "old_log_prob", "update_actor", "weight_sync"]
    assert names(algorithm__advantage="gae", **stays) == critic
    in_reward = names(algorithm__advantage="gae", algorithm__kl_in_reward=True, algorithm__kl_coef=0.1, **stays)
    assert in_reward[1:6] == ["old_log_prob", "reference", "values", "adv", "update_critic"]
    assert names(algorithm__advantage="reinforce_plus_plus", **stays)[2] == "adv"
    taught = names(algorithm__kl_coef=0.1, algorithm__reference="teacher", **stays)
    assert taught == ["gen", "teacher", "old_log_prob", "update_actor", "weight_sync"]
    demonstrations = {"train__source": "sft", "algorithm__loss": "sft", "algorithm__advantage": "none"}
    assert names(**demonstrations) == ["update_actor"]


def test_a_step_is_the_sum_of_its_phases() -> None:
    result = of()
    assert result.seconds == pytest.approx(sum(phase.seconds for phase in result.phases))
    assert result.tokens == 32 * 8 * (512 + 512) and result.tokens_per_second == result.tokens / result.seconds


def test_async_sampling_overlaps_training() -> None:
    disaggregated = {"rollout__max_staleness": 1, "cluster__placement": "disaggregated"}
    result = of(**disaggregated)
    seconds = {phase.name: phase.seconds for phase in result.phases}
    trained = seconds["old_log_prob"] + seconds["update_actor"]
    assert result.seconds == pytest.approx(max(seconds["gen"], trained) + seconds["weight_sync"])
    assert result.phases[1].begin == 0.0 and result.phases[-1].begin == seconds["gen"]
    few = of(rollout__engines=64, **disaggregated)
    assert few.seconds < result.seconds, "with more engines, the trainers are the bottleneck"


def test_greedy_samples_and_filtered_groups_add_sampling_time() -> None:
    plain, greedy = (of(algorithm__advantage=name).phases[0].seconds for name in ("grpo", "remax"))
    assert greedy > plain
    run_recipe = recipe(algorithm__dynamic_sampling__enabled=True)
    tried = estimate(run_recipe, {"rollout": QWEN}, device_named("H100"), tried=4.0).phases[0]
    assert tried.seconds > plain and "75% of groups are filtered" in tried.assumed


def test_a_synchronous_step_samples_the_surplus_of_over_sampling() -> None:
    def gen(oversample: float, tried: float, enabled: bool = True, **settings: Any) -> Any:
        run = recipe(
            algorithm__dynamic_sampling__enabled=enabled, algorithm__dynamic_sampling__oversample=oversample, **settings
        )
        return estimate(run, {"rollout": QWEN}, device_named("H100"), tried=tried).phases[0]

    assert gen(4.0, 1.0).seconds == gen(4.0, 3.0).seconds == gen(1.0, 4.0).seconds
    assert "75% of groups are filtered or surplus" in gen(4.0, 1.0).assumed
    assert gen(4.0, 5.0).seconds == gen(1.0, 5.0).seconds, "more are filtered"
    assert gen(4.0, 1.0, enabled=False).seconds == gen(1.0, 1.0).seconds
    ahead: dict[str, Any] = {"rollout__max_staleness": 1, "cluster__placement": "disaggregated"}
    assert gen(4.0, 1.0, **ahead).seconds == gen(1.0, 1.0, **ahead).seconds


def test_counted_engines_and_links_replace_formulas() -> None:
    counted, device = recipe(rollout__engine_args={"max_num_seqs": 64}, megatron__offload=False), device_named("H100")
    free, narrow = (
        estimate(counted, {"rollout": QWEN}, device, engine=engine).phases[0]
        for engine in (None, rank(cache=2 * 1000 * 1024))
    )
    assert narrow.seconds > free.seconds and "2 sequences at a time" in narrow.assumed
    assert "experts" not in narrow.assumed, "the model is dense"
    sharded = estimate(counted, {"rollout": QWEN}, device, links=Links("sharded", 10, 10, 10, 0)).phases[-1]
    assert sharded.seconds < 1e-6 and "sharded copies" in sharded.assumed


def test_factors_multiply_their_phase() -> None:
    device = device_named("H100")
    slower = replace(device, factors={"gen": 3.0})
    plain, tripled = (estimate(recipe(), {"rollout": QWEN}, variant).phases[0] for variant in (device, slower))
    assert tripled.seconds == pytest.approx(3 * plain.seconds) and "times 3, the measured factor" in tripled.assumed


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"cluster__trainers": 8}, {"cluster__trainers": 16}),
        ({"rollout__engines": 2}, {"rollout__engines": 8}),
        ({"rollout__max_response_length": 4096}, {"rollout__max_response_length": 1024}),
        ({"data__prompts_per_step": 256}, {"data__prompts_per_step": 128}),
        ({"megatron__recompute": "full"}, {"megatron__recompute": "none"}),
        ({"megatron__offload": True}, {"megatron__offload": False}),
        ({"actor__mini_batches": 4}, {"actor__mini_batches": 1}),
        ({"rollout__engine_args": {"max_num_seqs": 8}}, {"rollout__engine_args": {"max_num_seqs": 64}}),
        ({}, {"lora__rank": 8}),
    ],
)
def test_settings_that_must_be_faster(slower: dict[str, Any], faster: dict[str, Any]) -> None:
    common: dict[str, Any] = {"cluster__trainers": 8, "rollout__engines": 8, "data__prompts_per_step": 256}
    common |= {"rollout__max_response_length": 4096}
    assert of(**(common | slower)).seconds > of(**(common | faster)).seconds


@pytest.mark.parametrize("name", ["train_share", "prefill_share", "decode_share", "link_share"])
def test_a_better_share_is_faster(name: str) -> None:
    device = device_named("910C")
    run_recipe = recipe(cluster__trainers=8, megatron__tensor_parallel=2, megatron__offload=True)
    worse, better = (estimate(run_recipe, {"rollout": QWEN}, replace(device, **{name: share})) for share in (0.2, 0.4))
    assert better.seconds < worse.seconds


@pytest.mark.parametrize(
    "name", ["grpo_deepseek_v3", "ppo_qwen3_8b", "one_step_off_qwen3_8b", "sft_peft_qwen3_8b", "grpo_qwen2.5_vl_7b"]
)
def test_recipes_of_each_kind_are_estimated(name: str) -> None:
    path = ROOT / "recipes" / f"{name}.yaml"
    shape = re.search(r"^# Shape: (.*)$", path.read_text(), re.MULTILINE)
    assert shape
    model = published.read(shape[1])
    result = estimate(load_recipe(path, []), {"rollout": model, "critic": model}, device_named("910B"))
    assert 0 < result.seconds < 86_400 and result.tokens_per_micro_batch > 1
    assert all(phase.seconds > 0 and phase.bound and phase.assumed for phase in result.phases)
    phases, *columns = seconds_columns(replace(plans.BARE, estimate=result))
    assert phases == ["phase", *(phase.name for phase in result.phases), "step"]
    assert all(len(column) == len(phases) for column in columns)
