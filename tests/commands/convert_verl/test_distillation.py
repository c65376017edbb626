"""verl's on-policy distillation: the teacher, its loss and its advantage, or an error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError

LOSS = "distillation.distillation_loss."
TEACHER = "distillation.teacher_models.teacher_model."
RUN = f"""python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet algorithm.adv_estimator=grpo \
actor_rollout_ref.rollout.n=2 distillation.enabled=True distillation.nnodes=2 {TEACHER}model_path=models/teacher \
{TEACHER}inference.tensor_model_parallel_size=4 {TEACHER}inference.name=vllm {TEACHER}inference.gpu_memory_utilization=0.3 """
TEACHER_OF_RUN = {
    "path": "models/teacher",
    "tensor_parallel": 4,
    "engines": 4,  # 2 nodes of 8 devices
    "engine_args": {"gpu_memory_utilization": 0.3},
}


def recipe(options: str, *accepted: str) -> dict[str, Any]:
    return yaml.safe_load(convert(RUN + options, accepted=accepted).text)


def losses(options: str) -> str:
    return " ".join(f"{LOSS}{option}" for option in options.split())


def test_a_policy_gradient_with_the_reverse_kl() -> None:
    converted = recipe(losses("loss_mode=k1 use_policy_gradient=True use_task_rewards=False loss_max_clamp=10.0"))
    algorithm = converted["algorithm"]
    expected = {
        "reference": "teacher", "advantage": "on_policy_distillation", "kl_coef": 1.0, "kl_in_reward": True,
        "kl_estimator": "kl", "distill_max": 10.0, "dual_clip": 3.0, "whiten_advantages": False,
    }  # fmt: skip
    assert expected.items() <= algorithm.items() and "loss" not in algorithm, "ppo_clip is the default"
    assert converted["teacher"] == TEACHER_OF_RUN


def test_the_forward_kl_of_the_top_tokens() -> None:
    options = losses(
        "loss_mode=forward_kl_topk topk=64 use_task_rewards=False use_policy_gradient=False loss_max_clamp=10.0"
    )
    converted = recipe(options)
    expected = {"reference": "teacher", "advantage": "none", "loss": "gkd", "distill_max": 10.0, "distill_rest": False}
    assert expected.items() <= converted["algorithm"].items()  # 64 is the default of distill_top_k
    assert "kl_coef" not in converted["algorithm"] and converted["teacher"] == TEACHER_OF_RUN
    assert recipe(options.replace("topk=64", "topk=8"))["algorithm"]["distill_top_k"] == 8
    assert "distill_min_log_prob" not in converted["algorithm"]
    assert recipe(f"{options} {LOSS}log_prob_min_clamp=-10.0")["algorithm"]["distill_min_log_prob"] == -10.0


def test_task_rewards_and_a_kl_to_the_teacher() -> None:
    algorithm = recipe(losses("loss_mode=k3 distillation_loss_coef=0.5"))["algorithm"]
    assert (algorithm["reference"], algorithm["kl_coef"]) == ("teacher", 0.5)
    assert algorithm.get("kl_estimator", "low_var_kl") == "low_var_kl" and algorithm.get("advantage", "grpo") == "grpo"
    with pytest.raises(InputError, match="one KL term"):
        recipe("actor_rollout_ref.actor.use_kl_loss=True")
    with pytest.raises(InputError, match=f"--accept {LOSS}loss_max_clamp"):
        recipe(losses("loss_max_clamp=5"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (losses("loss_mode=k3 use_policy_gradient=True use_task_rewards=False"), "a policy gradient needs k1"),
        (losses("loss_mode=k1 use_policy_gradient=True"), "a policy gradient needs k1 and use_task_rewards=False"),
        (losses("loss_mode=k3 use_task_rewards=False"), "forward_kl_topk"),
        (losses("loss_mode=forward_kl_topk"), "an estimator of the KL"),
        ("distillation.teacher_models.other.model_path=x", "other needs key, model_path and num_replicas"),
        (f"{TEACHER}inference.tensor_model_parallel_size=3", "not a multiple"),
        (f"{TEACHER}model_path=null", "needs .*model_path"),
        ("distillation.mixture=1", "--accept distillation.mixture"),
    ],
)
def test_another_distillation_is_refused(options: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe(options)


@pytest.mark.parametrize(
    "mode", ["loss_mode=k1 use_policy_gradient=True", "loss_mode=forward_kl_topk use_policy_gradient=False"]
)
def test_without_task_rewards_the_policy_loss_has_no_other_term(mode: str) -> None:
    """Its policy loss is 0 in verl, so entropy bonus, KL, aggregation and weights of that loss are not converted."""
    actor = "actor_rollout_ref.actor."
    options = (
        f"{actor}entropy_coeff=0.01 {actor}use_kl_loss=True {actor}kl_loss_coef=0.3 {actor}kl_loss_type=low_var_kl+"
    )
    options += f" {actor}policy_loss.loss_mode=gspo algorithm.rollout_correction.rollout_is=token"
    algorithm = recipe(f"{options} {losses(f'{mode} use_task_rewards=False')}")["algorithm"]
    assert "entropy_coef" not in algorithm and "kl_straight_through" not in algorithm
    assert algorithm.get("aggregation", "token_mean") == "token_mean"
    by_gradient = "k1" in mode
    assert algorithm.get("kl_coef", 0) == (1.0 if by_gradient else 0)
    assert ("correction" in algorithm) == by_gradient
    plain = recipe(losses(f"{mode} use_task_rewards=False"))["algorithm"]
    assert {**algorithm, "correction": 0} == {**plain, "correction": 0}


def test_other_options_of_a_distillation_are_refused_if_there_is_one() -> None:
    for option in ("distillation.num_workers=2", f"{LOSS}mixture=1"):
        with pytest.raises(InputError, match=f"--accept {option.partition('=')[0]}"):
            recipe(option)
        assert "teacher" not in recipe(f"distillation.enabled=False {option}")


def test_a_run_that_does_not_distill_has_no_teacher() -> None:
    assert "teacher" not in recipe("distillation.enabled=False")
    accepted = recipe(losses("loss_mode=k3 use_task_rewards=False"), "distillation.enabled")
    assert "teacher" not in accepted and "reference" not in accepted["algorithm"]


MODELS = "distillation.teacher_models."
FIRST = f"+{MODELS}math.key=openai/gsm8k +{MODELS}math.model_path=a +{MODELS}math.num_replicas=3 {MODELS}math.inference.tensor_model_parallel_size=4"
SECOND = f"+{MODELS}geo.key=geo3k +{MODELS}geo.model_path=b +{MODELS}geo.num_replicas=1 {MODELS}geo.inference.tensor_model_parallel_size=4"
KL = losses("loss_mode=k3 use_task_rewards=True")


def test_named_teachers_replace_the_default_and_score_their_data_sources() -> None:
    converted = recipe(f"{KL} {FIRST} {SECOND}")["teacher"]
    assert converted == {
        "tensor_parallel": 4,
        "by_source": {"openai/gsm8k": {"path": "a", "engines": 3}, "geo3k": {"path": "b", "engines": 1}},
        "engine_args": {"gpu_memory_utilization": 0.5},
    }


def test_a_single_named_teacher_scores_every_row() -> None:
    converted = recipe(f"{KL} {FIRST.replace('replicas=3', 'replicas=4')}")["teacher"]
    assert (converted["path"], converted["engines"]) == ("a", 4) and "by_source" not in converted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (f"{FIRST} {SECOND.replace('size=4', 'size=2')}", "the teachers differ in inference.tensor_model_parallel_size"),
        (f"{FIRST} {SECOND} {MODELS}geo.inference.gpu_memory_utilization=0.3", "differ in inference.gpu_memory_utilization"),
        (f"{FIRST} {SECOND} distillation.n_gpus_per_node=4", "the teachers need 16 devices"),
        (f"{FIRST} {SECOND} distillation.teacher_key=task", "--accept distillation.teacher_key"),
        (f"{FIRST} {SECOND.replace('key=geo3k', 'key=openai/gsm8k')}", "two teachers have the key 'openai/gsm8k'"),
    ],
)  # fmt: skip
def test_teachers_that_megarl_cannot_start_are_refused(options: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        recipe(f"{KL} {options}")
