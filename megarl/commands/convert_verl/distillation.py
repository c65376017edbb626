"""verl's on-policy distillation from a teacher (verl/trainer/distillation/losses.py)."""

from __future__ import annotations

import fnmatch

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.table import AGGREGATIONS, KL_ESTIMATORS
from megarl.errors import InputError

_ENABLED = "distillation.enabled"
_LOSS = "distillation.distillation_loss"
_TEACHER = "distillation.teacher_models.teacher_model"
_KNOWN = (
    _ENABLED, "distillation.nnodes", "distillation.n_gpus_per_node", "distillation.teacher_key",
    "distillation.teacher_models.*", f"{_LOSS}.loss_mode", f"{_LOSS}.topk", f"{_LOSS}.use_task_rewards",
    f"{_LOSS}.distillation_loss_coef", f"{_LOSS}.loss_max_clamp", f"{_LOSS}.log_prob_min_clamp",
    f"{_LOSS}.use_policy_gradient", f"{_LOSS}.clip_ratio*", f"{_LOSS}.use_chunked_topk", f"{_LOSS}.chunked_topk_chunk_size",
)  # fmt: skip


def translate_distillation(conversion: Conversion) -> None:
    """Set teacher, loss and advantage of a run with `distillation.enabled`. Raises InputError for what megarl lacks."""
    settings, get = conversion.settings, conversion.get
    if get(_ENABLED) is not True or {_ENABLED, "algorithm.reference"} & {*conversion.user_choices}:
        return
    for name in conversion.options:
        translated = any(fnmatch.fnmatchcase(name, pattern) for pattern in _KNOWN)
        if name.startswith("distillation.") and not translated:
            conversion.leave_out(name, "megarl's distillation has no counterpart", changes=True)
    mode, rewards = str(get(f"{_LOSS}.loss_mode", "k3")), get(f"{_LOSS}.use_task_rewards", True)
    settings["algorithm.reference"] = "teacher"
    if get(f"{_LOSS}.use_policy_gradient", False):
        _check(
            conversion, mode in ("k1", "kl") and not rewards, "a policy gradient needs k1 and use_task_rewards=False"
        )
        _policy_gradient(conversion)
    elif rewards:
        _check(conversion, mode in KL_ESTIMATORS, "with task rewards the loss is an estimator of the KL")
        if get("actor_rollout_ref.actor.use_kl_loss") is True or get("algorithm.use_kl_in_reward") is True:
            raise InputError(
                f"{conversion.where(_ENABLED)}megarl has one KL term: to the teacher, or to the initial weights"
            )
        settings["algorithm.kl_coef"] = get(f"{_LOSS}.distillation_loss_coef", 1.0)
        settings["algorithm.kl_estimator"] = KL_ESTIMATORS[mode]
        if limit := get(f"{_LOSS}.loss_max_clamp"):
            reason = f"algorithm.kl_estimator has no limit for a token: {limit}"
            conversion.leave_out(f"{_LOSS}.loss_max_clamp", reason, changes=True)
    else:
        _check(conversion, mode == "forward_kl_topk", "without task rewards and policy gradient it is forward_kl_topk")
        _forward_kl(conversion)
    _teacher(conversion)


def _check(conversion: Conversion, supported: bool, reason: str) -> None:
    if not supported:
        option = f"{_LOSS}.loss_mode"
        value = conversion.get(option, "k3")
        raise InputError(
            f"{conversion.where(option)}{option}={value}: {reason}. megarl has no counterpart: give algorithm.reference "
            f"and the settings of docs/algorithms.md, or --accept {_ENABLED} to leave the distillation out"
        )


def _drop_policy_loss(conversion: Conversion) -> None:
    """Remove the terms of verl's policy loss, which is 0 without task rewards."""
    for prefix in ("entropy_coef", "kl_"):
        conversion.drop(f"algorithm.{prefix}", "without task rewards verl's loss has no such term")
    mode = conversion.get("actor_rollout_ref.actor.loss_agg_mode")
    conversion.settings["algorithm.aggregation"] = AGGREGATIONS[mode]


def _policy_gradient(conversion: Conversion) -> None:
    settings = conversion.settings
    _drop_policy_loss(conversion)
    conversion.note("algorithm.adv_estimator", "not used: without task rewards the advantages are the teacher's")
    settings |= {
        "algorithm.advantage": "on_policy_distillation",
        "algorithm.whiten_advantages": False,
        "algorithm.kl_coef": 1.0,
        "algorithm.kl_estimator": "kl",
        "algorithm.kl_in_reward": True,
        "algorithm.loss": "ppo_clip",
        "algorithm.clip_low": conversion.get(f"{_LOSS}.clip_ratio_low", 0.2),
        "algorithm.clip_high": conversion.get(f"{_LOSS}.clip_ratio_high", 0.2),
        "algorithm.dual_clip": 3.0,
    }
    _limit(conversion)
    conversion.note(
        _ENABLED, "the teacher's advantages are computed once per step; verl computes them again in each mini batch"
    )


def _forward_kl(conversion: Conversion) -> None:
    _drop_policy_loss(conversion)
    conversion.settings |= {
        "algorithm.advantage": "none",
        "algorithm.loss": "gkd",
        "algorithm.distill_top_k": conversion.number(f"{_LOSS}.topk", 32),
        "algorithm.distill_beta": 0.0,
        "algorithm.distill_rest": False,
    }
    _limit(conversion)
    if (least := conversion.get(f"{_LOSS}.log_prob_min_clamp")) is not None:
        conversion.settings["algorithm.distill_min_log_prob"] = least


def _limit(conversion: Conversion) -> None:
    if (limit := conversion.get(f"{_LOSS}.loss_max_clamp")) is not None:
        conversion.settings["algorithm.distill_max"] = limit


def _teacher(conversion: Conversion) -> None:
    settings, get = conversion.settings, conversion.get
    teacher_options = [name for name in conversion.options if name.startswith("distillation.teacher_models.")]
    if other := next((name for name in teacher_options if not name.startswith(f"{_TEACHER}.")), None):
        raise InputError(f"{conversion.where(other)}{other}: megarl has one teacher, named teacher_model")
    path, inference = get(f"{_TEACHER}.model_path"), f"{_TEACHER}.inference"
    if not path:
        raise InputError(f"{conversion.where(_ENABLED)}{_ENABLED}=True needs {_TEACHER}.model_path")
    devices = conversion.number("distillation.nnodes", 0) * conversion.number("distillation.n_gpus_per_node", 8)
    size = conversion.number(f"{inference}.tensor_model_parallel_size", 2)
    if not devices or devices % size:
        raise InputError(
            f"{conversion.where('distillation.nnodes')}the teacher's {devices} devices (distillation.nnodes x "
            f"n_gpus_per_node) are not a multiple of its tensor_model_parallel_size={size}"
        )
    settings |= {"teacher.path": path, "teacher.tensor_parallel": size, "teacher.engines": devices // size}
    memory = get(f"{inference}.gpu_memory_utilization", 0.5)
    settings["teacher.engine_args.gpu_memory_utilization"] = memory
