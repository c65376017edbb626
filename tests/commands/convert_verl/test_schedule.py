"""Learning-rate schedules of actor and critic, and the comparison with verl's composed configuration."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from benchmarks.verl_parity import derived, differences, unused
from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError

RUN = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet data.train_batch_size=64 \
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.optim.lr=1e-5 "
)
GRPO, PPO = f"{RUN} algorithm.adv_estimator=grpo ", f"{RUN} algorithm.adv_estimator=gae "
ACTOR, CRITIC = "actor_rollout_ref.actor.optim.", "critic.optim."


def optimizer(command: str, section: str = "actor") -> dict[str, Any]:
    return yaml.safe_load(convert(command).text).get(section, {}).get("optimizer", {})


def test_steps_of_a_schedule_are_optimizer_steps() -> None:
    """4 mini batches and 2 epochs: 8 optimizer steps per step of verl's schedule."""
    options = "lr_warmup_steps=10 lr_decay_style=cosine lr_decay_steps=100 min_lr=1e-6"
    command = GRPO + " ".join(f"{ACTOR}{option}" for option in options.split())
    schedule = {"warmup_steps": 40, "decay": "cosine", "decay_steps": 400, "min_lr_ratio": pytest.approx(0.1)}
    assert optimizer(command) == {"lr": 1e-5, **schedule}
    twice = {"warmup_steps": 80, "decay": "cosine", "decay_steps": 800, "min_lr_ratio": pytest.approx(0.1)}
    assert optimizer(f"{command} actor_rollout_ref.actor.ppo_epochs=2") == {"lr": 1e-5, **twice}


def test_a_warm_up_by_ratio() -> None:
    """verl's Megatron takes it of lr_decay_steps, if set; other engines of the run's steps."""
    options = f"{GRPO} {ACTOR}lr_warmup_steps_ratio=0.1 trainer.total_training_steps=100"
    assert optimizer(options)["warmup_steps"] == 40
    assert optimizer(f"{options} model_engine=megatron {ACTOR}lr_decay_steps=1000")["warmup_steps"] == 400
    assert optimizer(f"{options} model_engine=fsdp {ACTOR}lr_decay_steps=1000")["warmup_steps"] == 40
    veomni = f"{GRPO} model_engine=veomni {ACTOR}lr_warmup_steps=5"
    assert "warmup_steps" not in optimizer(veomni), "verl's VeOmni reads the ratio alone"


def test_the_end_of_a_decay_needs_no_learning_rate() -> None:
    command = f"{RUN.replace(f'{ACTOR}lr=1e-5', '')} algorithm.adv_estimator=grpo"
    converted = optimizer(f"{command} {ACTOR}lr_decay_style=cosine {ACTOR}min_lr=1e-7 {ACTOR}lr_decay_steps=1e3")
    assert converted == {"min_lr_ratio": pytest.approx(0.1), "decay": "cosine", "decay_steps": 4000}


def test_a_constant_rate_has_no_end_of_decay() -> None:
    assert optimizer(f"{GRPO} {ACTOR}lr_decay_steps=10000000 {ACTOR}min_lr=1e-7") == {"lr": 1e-5}


def test_veomni_decays_by_default() -> None:
    assert optimizer(f"{GRPO} model_engine=veomni")["decay"] == "cosine"
    assert "decay" not in optimizer(f"{GRPO} model_engine=veomni {ACTOR}lr_scheduler_type=constant")
    assert "decay" not in optimizer(f"{GRPO} model_engine=megatron")


def test_the_critic_has_a_schedule_of_its_own() -> None:
    options = f"{CRITIC}lr=1e-4 {CRITIC}lr_warmup_steps=3 {CRITIC}lr_scheduler_type=cosine {CRITIC}betas=[0.9,0.95]"
    converted = optimizer(f"{PPO} {options} critic.ppo_mini_batch_size=32", "critic")
    assert converted == {"lr": 1e-4, "warmup_steps": 6, "decay": "cosine", "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    "option",
    [f"{ACTOR}optimizer=muon", f"{ACTOR}num_cycles=2", f"{CRITIC}optimizer=sgd"],
)
def test_another_schedule_or_optimizer_is_refused(option: str) -> None:
    with pytest.raises(InputError, match=f"--accept {option.partition('=')[0]}"):
        convert(PPO + option)


OPTIONS = {
    "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "data.train_batch_size": 64, "data.max_prompt_length": 512,
    "data.max_response_length": 512, "trainer.save_freq": -1, "algorithm.adv_estimator": "grpo", "algorithm.gamma": 0.9,
    "actor_rollout_ref.actor.strategy": "megatron", "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.actor.ppo_epochs": 1, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
    "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 5, "critic.cliprange_value": 0.2, "algorithm.lam": 1.0,
}  # fmt: skip
RECIPE = {
    "cluster.trainers": 8, "actor.mini_batches": 4, "actor.max_tokens_per_micro_batch": 4096, "algorithm.kl_coef": 0.0,
    "algorithm.kl_in_reward": False, "rollout.tensor_parallel": 2, "rollout.engines": 4, "train.save_every": 0,
    "actor.optimizer.warmup_steps": 20, "algorithm.gamma": 0.9, "algorithm.advantage": "grpo", "data.prompts_per_step": 64,
    "data.max_prompt_length": 512, "rollout.max_response_length": 512, "actor.epochs": 1, "lora.rank": 0,
}  # fmt: skip


def test_equal_configurations_have_no_difference() -> None:
    assert list(differences(OPTIONS, {}, RECIPE, [])) == []
    assert {"algorithm.lam", "critic.*"} <= {*unused(OPTIONS)}
    assert {key for _, key, _ in derived(OPTIONS)} >= {"actor.mini_batches", "actor.optimizer.warmup_steps"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("algorithm.gamma", 1.0), ("actor.mini_batches", 1), ("actor.optimizer.warmup_steps", 5), ("rollout.engines", 8)],
)
def test_a_difference_is_silent_unless_a_note_names_it(key: str, value: float) -> None:
    (difference,) = differences(OPTIONS, {}, {**RECIPE, key: value}, ["line 3: something=else: unrelated"])
    assert (difference.key, difference.recipe, difference.expected, difference.note) == (key, value, RECIPE[key], "")
    (difference,) = differences(OPTIONS, {}, {**RECIPE, key: value}, [f"line 7: {key}={value}: for a reason"])
    assert difference.note
    (difference,) = differences(OPTIONS, {}, {**RECIPE, key: value}, [f"line 7: {key}_more=3: set {key} to 3"])
    assert not difference.note, "a note about another option that mentions this one"
