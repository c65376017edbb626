"""verl's on-policy distillation from a teacher (verl/trainer/distillation/losses.py)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.table import AGGREGATIONS, KL_ESTIMATORS
from megarl.errors import InputError

_ENABLED = "distillation.enabled"
_LOSS = "distillation.distillation_loss"
_TEACHERS = "distillation.teacher_models"
_KNOWN = (
    _ENABLED, "distillation.nnodes", "distillation.n_gpus_per_node", "distillation.teacher_key",
    "distillation.teacher_models.*", f"{_LOSS}.loss_mode", f"{_LOSS}.topk", f"{_LOSS}.use_task_rewards",
    f"{_LOSS}.distillation_loss_coef", f"{_LOSS}.loss_max_clamp", f"{_LOSS}.log_prob_min_clamp",
    f"{_LOSS}.use_policy_gradient", f"{_LOSS}.clip_ratio*", f"{_LOSS}.use_chunked_topk", f"{_LOSS}.chunked_topk_chunk_size",
)  # fmt: skip


def translate_distillation(conversion: Conversion) -> None:
    """Set teacher, loss and advantage of a run with `distillation.enabled`. Raises InputError for what megarl lacks."""
    settings, get = conversion.settings, conversion.get
    if not conversion.is_on(_ENABLED) or {_ENABLED, "algorithm.reference"} & {*conversion.user_choices}:
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
        if conversion.is_on("actor_rollout_ref.actor.use_kl_loss") or conversion.is_on("algorithm.use_kl_in_reward"):
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
    """Set the teachers. As in verl, named teachers replace `teacher_model`, and a single one scores every row."""
    settings, get = conversion.settings, conversion.get
    prefix = f"{_TEACHERS}."
    names = dict.fromkeys(
        name.removeprefix(prefix).partition(".")[0] for name in conversion.options if name.startswith(prefix)
    )
    named = [name for name in names if name != "teacher_model"]
    if not named:
        path, engines, size = _only_teacher(conversion)
        settings |= {"teacher.path": path, "teacher.engines": engines, "teacher.tensor_parallel": size}
    else:
        teachers = {name: _named_teacher(conversion, name) for name in named}
        size = _shared(conversion, teachers, "tensor_model_parallel_size", 2)
        total = sum(engines for _, _, engines in teachers.values()) * size
        if total != _devices(conversion):
            raise InputError(
                f"{conversion.where('distillation.n_gpus_per_node')}the teachers need {total} devices, and distillation.nnodes x "
                f"n_gpus_per_node has {_devices(conversion)}"
            )
        settings["teacher.tensor_parallel"] = size
        if len(teachers) == 1:
            ((_, path, engines),) = teachers.values()
            settings |= {"teacher.path": path, "teacher.engines": engines}
        else:
            key = get("distillation.teacher_key", "data_source")
            if key != "data_source":
                reason = "megarl chooses the teacher by the row's data_source"
                conversion.leave_out("distillation.teacher_key", reason, changes=True)
            by_source = {source: {"path": path, "engines": engines} for source, path, engines in teachers.values()}
            sources = [source for source, *_ in teachers.values()]
            if twice := next((source for source in sources if sources.count(source) > 1), None):
                raise InputError(f"two teachers have the key {twice!r}")
            settings["teacher.by_source"] = by_source
    memory = _shared(conversion, named or ["teacher_model"], "gpu_memory_utilization", 0.5)
    settings["teacher.engine_args.gpu_memory_utilization"] = memory


def _only_teacher(conversion: Conversion) -> tuple[str, int, int]:
    """Return path, engines and devices per engine of the teacher that has all devices."""
    option, inference = f"{_TEACHERS}.teacher_model.model_path", f"{_TEACHERS}.teacher_model.inference"
    path = conversion.get(option)
    if not path:
        raise InputError(f"{conversion.where(_ENABLED)}{_ENABLED}=True needs {option}")
    devices, size = _devices(conversion), conversion.number(f"{inference}.tensor_model_parallel_size", 2)
    if not devices or devices % size:
        raise InputError(
            f"{conversion.where('distillation.nnodes')}the teacher's {devices} devices (distillation.nnodes x "
            f"n_gpus_per_node) are not a multiple of its tensor_model_parallel_size={size}"
        )
    return path, devices // size, size


def _named_teacher(conversion: Conversion, name: str) -> tuple[str, str, int]:
    """Return the data source, the path and the engines of a teacher. Raises InputError if verl refuses it."""
    values = [conversion.get(f"{_TEACHERS}.{name}.{part}") for part in ("key", "model_path")]
    engines = conversion.number(f"{_TEACHERS}.{name}.num_replicas", 0)
    if not all(values) or not engines:
        raise InputError(
            f"{conversion.where(f'{_TEACHERS}.{name}.key')}{_TEACHERS}.{name} needs key, model_path and num_replicas"
        )
    return str(values[0]), str(values[1]), engines


def _devices(conversion: Conversion) -> int:
    return conversion.number("distillation.nnodes", 0) * conversion.number("distillation.n_gpus_per_node", 8)


def _shared(conversion: Conversion, names: Iterable[str], part: str, default: Any) -> Any:
    """Return an argument of the teachers' engines. Raises InputError if they differ: megarl's teachers share it."""
    values = {name: conversion.get(f"{_TEACHERS}.{name}.inference.{part}", default) for name in names}
    if len(set(values.values())) > 1:
        each = ", ".join(f"{name} has {value}" for name, value in values.items())
        raise InputError(f"the teachers differ in inference.{part}: {each}; megarl's teachers share their section")
    return next(iter(values.values()))
