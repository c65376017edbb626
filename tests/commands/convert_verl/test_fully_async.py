"""Scripts of verl's fully asynchronous trainer become disaggregated recipes.

Source of the expected values: verl main of August 2026, verl/experimental/fully_async_policy/ and docs/advance/fully_async.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.verl_parity import differences
from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError
from tests.commands.convert_verl.test_convert import GRPO, settings
from tests.commands.convert_verl.test_schedule import OPTIONS, RECIPE

ASYNC, ACTOR = "async_training.", "actor_rollout_ref.actor."
RUN = (
    GRPO.replace("verl.trainer.main_ppo", "verl.experimental.fully_async_policy.fully_async_main")
    + f" data.train_batch_size=0 {ACTOR}ppo_mini_batch_size=16 rollout.total_rollout_steps=640"
)
SCRIPT = """#!/usr/bin/env bash
set -euo pipefail
train_nodes=2
sampling_nodes=3
per_node=8
mini=32
syncs=50
updates_per_sync=4
python3 -m verl.experimental.fully_async_policy.fully_async_main \\
    --config-path=config --config-name=fully_async_ppo_megatron_trainer.yaml \\
    algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=0 data.gen_batch_size=1 \\
    actor_rollout_ref.model.path=model actor_rollout_ref.hybrid_engine=False \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.n=6 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    trainer.nnodes=$train_nodes trainer.n_gpus_per_node=$per_node trainer.save_freq=30 trainer.test_freq=5 \\
    rollout.nnodes=$sampling_nodes rollout.n_gpus_per_node=$per_node \\
    rollout.total_rollout_steps=$((mini * updates_per_sync * 2 * syncs)) \\
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=$updates_per_sync \\
    async_training.require_batches=2 async_training.partial_rollout=True
"""


def notes(text: str, **more: Any) -> str:
    return "\n".join(convert(text, **more).notes)


def test_a_script_with_partial_rollouts() -> None:
    converted = settings(SCRIPT)
    expected = {
        "data.prompts_per_step": 32 * 2 * 4,
        "actor.mini_batches": 2 * 4,
        "actor.optimizer.warmup_steps": 10 * 2,
        "rollout.samples_per_prompt": 6,
        "rollout.max_staleness": 0.5,
        "rollout.at_update": "refresh",
        "rollout.tensor_parallel": 4,
        "rollout.engines": 3 * 8 // 4,
        "cluster.placement": "disaggregated",
        "cluster.trainers": 2 * 8,
        "megatron.tensor_parallel": 4,
        "algorithm.old_log_probs": "rollout",
        "train.steps": 50,
        "train.save_every": 30,
        "evaluation.every": 5,
    }
    assert {key: converted.get(key) for key in expected} == expected


def test_defaults_are_those_of_the_trainer() -> None:
    converted = settings(RUN)
    assert (converted["data.prompts_per_step"], converted["actor.mini_batches"]) == (64, 4)
    assert (converted["rollout.max_staleness"], converted["rollout.at_update"]) == (0.1, "refresh")
    assert converted["algorithm.old_log_probs"] == "rollout"
    assert (converted["cluster.trainers"], converted["rollout.engines"], converted["train.steps"]) == (8, 4, 10)


def test_computed_old_log_probs() -> None:
    """The policy before the step. verl restores it for each update until the engines receive weights."""
    assert "algorithm.old_log_probs" not in settings(f"{RUN} algorithm.rollout_correction.bypass_mode=False")


def test_without_partial_rollouts_requests_finish_first() -> None:
    run = f"{RUN} {ASYNC}partial_rollout=False {ASYNC}staleness_threshold=1"
    assert (settings(run)["rollout.at_update"], settings(run)["rollout.max_staleness"]) == ("drain", 1)
    assert "requests finish before an update" in notes(run)


def test_no_staleness_is_synchronous() -> None:
    """No request runs at an update then, so partial_rollout has no effect."""
    for partial in (True, False):
        run = f"{RUN} {ASYNC}staleness_threshold=0 {ASYNC}partial_rollout={partial}"
        assert {"rollout.max_staleness", "rollout.at_update"}.isdisjoint(settings(run))
        assert "partial_rollout" not in notes(run)


@pytest.mark.parametrize(("batches", "updates"), [(1, 4), (2, 4), (4, 1), (1, 1)])
def test_schedules_advance_once_per_update_of_verls_actor(batches: int, updates: int) -> None:
    run = f"{RUN} {ASYNC}require_batches={batches} {ASYNC}trigger_parameter_sync_step={updates}"
    converted = settings(
        f"{run} model_engine=megatron {ACTOR}optim.lr_decay_style=cosine {ACTOR}optim.lr_decay_steps=100"
    )
    assert converted["data.prompts_per_step"] == 16 * batches * updates
    assert converted.get("actor.mini_batches", 1) == batches * updates
    assert converted["actor.optimizer.decay_steps"] == 100 * batches
    assert converted["train.steps"] == 640 // (16 * batches * updates)


class TestSteps:
    def test_rows_limit_the_prompts(self) -> None:
        run = f"{RUN} trainer.total_epochs=2"
        assert settings(run, rows=128)["train.steps"] == 4
        assert settings(run, rows=9999)["train.steps"] == 10
        assert "pass --rows if that is below 640" in notes(run)
        assert "--rows" not in notes(run, rows=128)
        unlimited = run.replace("total_rollout_steps=640", "total_rollout_steps=null")
        assert settings(unlimited, rows=999)["train.steps"] == 31
        assert "set it to rows x 2 / 64" in notes(unlimited)

    def test_updates_after_the_last_whole_step_are_noted(self) -> None:
        run = RUN.replace("=640", "=700")
        assert settings(run)["train.steps"] == 10 and "leaves out verl's last 3 updates" in notes(run)
        assert "leaves out" not in notes(RUN)

    def test_less_than_a_step_is_refused(self) -> None:
        run = RUN.replace("=640", "=63")
        with pytest.raises(InputError, match="63 prompts are less than a step of 64"):
            convert(run)
        assert settings(run, "train.steps=7")["train.steps"] == 7

    def test_the_synchronous_trainers_length_is_not_read(self) -> None:
        run = f"{RUN} trainer.total_training_steps=3"
        assert settings(run)["train.steps"] == 10 and "trainer.total_training_steps=3: no counterpart" in notes(run)


class TestSchedule:
    def test_a_ratio_has_no_warm_up(self) -> None:
        """verl builds FSDP's schedule with -1 steps."""
        ratio = f"{ACTOR}optim.lr_warmup_steps_ratio=0.5"
        assert "actor.optimizer.warmup_steps" not in settings(f"{RUN} {ratio}")
        assert "no warm-up: verl's schedule lacks the number of steps" in notes(f"{RUN} {ratio}")
        megatron = f"{RUN} model_engine=megatron {ratio} {ACTOR}optim.lr_decay_steps=100"
        assert settings(megatron)["actor.optimizer.warmup_steps"] == 50

    def test_a_decay_with_fsdp_is_refused(self) -> None:
        option = f"{ACTOR}optim.lr_scheduler_type"
        with pytest.raises(InputError, match=f"--accept {option}"):
            convert(f"{RUN} {option}=cosine")
        accepted = convert(f"{RUN} {option}=cosine", accepted=[option])
        assert "decay" not in accepted.text.partition("name:")[2] and "oscillates" in "\n".join(accepted.notes)
        assert settings(f"{RUN} {option}=cosine", "actor.optimizer.decay=cosine")["actor.optimizer.decay"] == "cosine"


class TestWhatIsNotCarriedOver:
    def test_the_order_of_arrival_is_always_noted(self) -> None:
        for run in (RUN, SCRIPT, f"{RUN} {ASYNC}staleness_threshold=0"):
            assert "in the order of their arrival" in notes(run)

    @pytest.mark.parametrize(
        ("options", "is_refused"),
        [
            ("actor_rollout_ref.rollout.name=sglang", True),
            (f"model_engine=megatron {ACTOR}megatron.router_replay.mode=R3", True),
            ("actor_rollout_ref.rollout.name=vllm", False),
        ],
    )
    def test_partial_rollouts_where_requests_cannot_continue(self, options: str, is_refused: bool) -> None:
        run, option = f"{RUN} {ASYNC}partial_rollout=True {options}", f"{ASYNC}partial_rollout"
        if not is_refused:
            assert settings(run)["rollout.at_update"] == "refresh"
            return
        with pytest.raises(InputError, match=f"--accept {option}"):
            convert(run)
        assert "at_update: drain" in convert(run, accepted=[option]).text
        assert settings(run, "rollout.at_update=drain")["rollout.at_update"] == "drain"

    def test_trtllm_is_noted_as_in_other_runs(self) -> None:
        run = f"{RUN} actor_rollout_ref.rollout.name=trtllm"
        assert "rollout.name=trtllm: this value has no counterpart; supported: vllm, sglang" in notes(run)
        assert "rollout.engine" not in settings(run)

    @pytest.mark.parametrize("option", ["use_trainer_do_validate", "use_dynamic_resource_scheduling"])
    def test_trainers_that_sample_are_noted(self, option: str) -> None:
        assert f"{option}=True: no counterpart: the trainers' devices do not sample" in notes(
            f"{RUN} {ASYNC}{option}=True"
        )
        assert option not in notes(f"{RUN} {ASYNC}{option}=False")

    def test_an_unknown_option_is_refused(self) -> None:
        with pytest.raises(InputError, match=f"--accept {ASYNC}new_rule"):
            convert(f"{RUN} {ASYNC}new_rule=1")

    def test_groups_are_not_filtered(self) -> None:
        run = f"{RUN} +algorithm.filter_groups.enable=True +algorithm.filter_groups.metric=acc"
        assert not [key for key in settings(run) if "dynamic_sampling" in key]
        assert "filter_groups.enable=True: not used" in notes(run)

    def test_statistics_of_the_batch_are_of_the_step(self) -> None:
        words = "statistics of advantages: of the whole step of 64 prompts; in verl of an update of 16"
        run = RUN.replace("=grpo", "=reinforce_plus_plus")
        assert words in notes(run)
        assert "of the whole step" not in notes(f"{run} {ASYNC}trigger_parameter_sync_step=1")
        assert "of the whole step" not in notes(RUN)
        assert "passes of ppo_epochs: of the whole step" in notes(f"{RUN} {ACTOR}ppo_epochs=2")


def test_memory_of_engines_on_devices_of_their_own() -> None:
    rollout = "actor_rollout_ref.rollout."
    run = f"{RUN} {rollout}standalone_gpu_memory_utilization=0.9 {rollout}gpu_memory_utilization=0.4"
    assert settings(run)["rollout.engine_args.gpu_memory_utilization"] == 0.9
    unset = run.replace("standalone_gpu_memory_utilization=0.9", "standalone_gpu_memory_utilization=null")
    assert settings(unset)["rollout.engine_args.gpu_memory_utilization"] == 0.4


def test_a_critic_updates_as_often_as_the_actor() -> None:
    run = RUN.replace("=grpo", "=gae") + f" {ASYNC}require_batches=2 critic.optim.lr_warmup_steps=3"
    converted = settings(run)
    assert converted["actor.mini_batches"] == converted["critic.mini_batches"] == 8
    assert converted["critic.optimizer.warmup_steps"] == 6
    larger = settings(f"{run} critic.ppo_mini_batch_size=64")
    assert larger["critic.mini_batches"] == 4 and larger["critic.optimizer.warmup_steps"] == 3
    assert "values: of the whole step" in notes(run).replace("statistics of advantages, ", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("data.train_batch_size=64", "fully_async_main needs data.train_batch_size=0"),
        ("data.gen_batch_size=2", "fully_async_main needs data.gen_batch_size=1"),
        (f"{ASYNC}staleness_threshold=-0.1", "is not a number of at least 0"),
        (f"{ASYNC}trigger_parameter_sync_step=0", "trigger_parameter_sync_step=0 is below 1"),
        (f"{ASYNC}require_batches=0.5", "require_batches=0.5 is not an integer"),
    ],
)
def test_values_that_verl_refuses(options: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(f"{RUN} {options}")


def test_other_trainers_have_none_of_these_notes() -> None:
    assert "order of their arrival" not in notes(GRPO) and "at_update" not in convert(GRPO).text


class TestParity:
    """The second formulas of benchmarks/verl_parity.py."""

    OPTIONS = OPTIONS | {
        "data.train_batch_size": 0, f"{ASYNC}trigger_parameter_sync_step": 4, f"{ASYNC}require_batches": 2,
        f"{ASYNC}staleness_threshold": 0.5, f"{ASYNC}partial_rollout": True, "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 4, "rollout.total_rollout_steps": 1280,
    }  # fmt: skip
    EXPECTED = RECIPE | {
        "data.prompts_per_step": 128, "actor.mini_batches": 8, "actor.optimizer.warmup_steps": 10, "rollout.engines": 2,
        "cluster.placement": "disaggregated", "rollout.max_staleness": 0.5, "rollout.at_update": "refresh", "train.steps": 10,
    }  # fmt: skip

    def test_equal_configurations_have_no_difference(self) -> None:
        assert list(differences(self.OPTIONS, {}, self.EXPECTED, [])) == []

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("data.prompts_per_step", 32),
            ("actor.mini_batches", 4),
            ("actor.optimizer.warmup_steps", 40),
            ("rollout.engines", 4),
            ("cluster.placement", "colocated"),
            ("rollout.max_staleness", 0.1),
            ("rollout.at_update", "drain"),
            ("train.steps", 20),
        ],
    )
    def test_each_setting_is_compared(self, key: str, value: object) -> None:
        keys = [each.key for each in differences(self.OPTIONS, {}, self.EXPECTED | {key: value}, [])]
        assert set(keys) == {key}


def test_the_critics_warm_up_counts_updates() -> None:
    run = f"{RUN.replace('grpo', 'gae')} trainer.critic_warmup=10"
    assert settings(run)["critic.warmup_steps"] == 3  # of 4 updates each


def test_a_length_of_the_schedule_is_refused() -> None:
    run = f"{RUN} {ACTOR}optim.total_training_steps=400 {ACTOR}optim.lr_warmup_steps_ratio=0.1"
    with pytest.raises(InputError, match="verl's schedules have this length in updates"):
        convert(run)


def test_the_last_step_is_evaluated_only_when_it_is_due() -> None:
    converted = settings(f"{RUN} data.val_files=test.parquet trainer.test_freq=3")
    assert converted["evaluation.every"] == 3 and "evaluation.at_end" not in converted
    assert "at most 16 groups per engine" in notes(RUN)
