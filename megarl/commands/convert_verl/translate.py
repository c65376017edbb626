"""Settings that depend on several of verl's options: batches, layouts, schedules, KL, evaluation."""

from __future__ import annotations

import math
import re

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.correction import translate_correction
from megarl.commands.convert_verl.distillation import translate_distillation
from megarl.commands.convert_verl.entry_points import Kind
from megarl.commands.convert_verl.fully_async import note_batches, read_updates, translate_fully_async
from megarl.commands.convert_verl.gkd import translate_gkd
from megarl.commands.convert_verl.inputs import (
    translate_agent,
    translate_columns,
    translate_dataset_class,
    translate_engine,
)
from megarl.commands.convert_verl.lora import translate_lora
from megarl.commands.convert_verl.losses import translate_kl, translate_loss, translate_single_samples
from megarl.commands.convert_verl.rewards import LONGEST, OVERLONG, translate_reward_function
from megarl.commands.convert_verl.sampling import ARRIVAL, TrainerSampling, Updates, sampling_of, updates_of
from megarl.commands.convert_verl.trainers import (
    frequency,
    offloaded,
    translate_layout,
    translate_router_losses,
    translate_schedule,
)
from megarl.errors import InputError

_TRACKERS = ("wandb", "swanlab", "mlflow")
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_VAL_ONLY = "trainer.val_only"


def translate_rl(conversion: Conversion, *, megatron: bool, kind: Kind, rows: int | None) -> None:
    """Derive the settings of an RL run.

    megatron: verl's actor uses Megatron, not FSDP. kind: of the trainer.
    rows: number of rows of training data; None: unknown.
    """
    is_fully_async, sampling = kind == "fully_async", sampling_of(conversion, kind)
    updates = read_updates(conversion) if is_fully_async else updates_of(conversion, kind)
    translate_prompts(conversion)
    _check_lengths(conversion)
    _batches(conversion, updates, sampling, megatron=megatron)
    translate_lora(conversion, megatron=megatron)
    translate_layout(conversion, megatron=megatron, sampling=sampling)
    translate_kl(conversion)
    translate_distillation(conversion)
    if kind == "distillation":
        translate_gkd(conversion)
    translate_loss(conversion)
    translate_correction(conversion)
    if conversion.settings.get("algorithm.loss") == "gkd":
        for name in ("weights", "truncate", "normalize"):
            conversion.drop(f"algorithm.correction.{name}", "verl's supervised loss has no weights")
    translate_single_samples(conversion)
    if is_fully_async:
        translate_fully_async(conversion, updates, megatron=megatron, rows=rows)
    else:
        _dynamic_sampling(conversion)
        note_batches(conversion, updates)
        if sampling.at_update == "refresh":
            conversion.notes.append(ARRIVAL)
    _overlong(conversion)
    translate_reward_function(conversion)
    translate_agent(conversion)
    translate_columns(conversion)
    translate_dataset_class(conversion)
    translate_engine(conversion)
    advance = (
        conversion.settings["actor.mini_batches"] * int(conversion.settings.get("actor.epochs", 1)) // updates.count
    )
    common(conversion, rows=rows, updates=advance, optimizer=f"{_A}.optim", megatron=megatron)
    _validation(conversion)
    _evaluation_alone(conversion, kind)
    if is_fully_async:  # its last step is evaluated only if test_freq divides it
        conversion.settings.pop("evaluation.at_end", None)
    if conversion.settings.get("algorithm.advantage") == "gae":
        _critic(conversion, updates, sampling=sampling, megatron=megatron)
    else:
        conversion.drop("critic.", "no critic: algorithm.advantage is not gae")


def common(conversion: Conversion, *, rows: int | None, updates: int, optimizer: str, megatron: bool = False) -> None:
    """Derive settings of RL and SFT: name, trackers, number of steps, checkpoints, evaluation and schedule.

    updates: optimizer steps per training step. optimizer: prefix of the optimizer's options in verl.
    """
    settings = conversion.settings
    name = str(conversion.get("trainer.experiment_name") or "run")
    settings["name"] = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    trackers = conversion.get("trainer.logger") or []
    trackers = trackers if isinstance(trackers, list) else [trackers]
    settings["observe.trackers"] = [tracker for tracker in trackers if tracker in _TRACKERS]
    if unsupported := [tracker for tracker in trackers if tracker not in (*_TRACKERS, "console", "tensorboard")]:
        conversion.note("trainer.logger", f"no counterpart for {', '.join(map(str, unsupported))}")
    _steps(conversion, rows)
    every = frequency(conversion, "trainer.save_freq", rows)
    settings |= {"train.save_every": every} if every > 0 else {"train.save_at_end": every < -1}
    limit = conversion.get("data.val_max_samples", -1)
    if limit > 0 and "data.eval_files" in settings:
        settings["evaluation.limit"] = limit
        conversion.note("data.val_max_samples", "the first rows of the files; verl draws them at random if it shuffles")
    every = frequency(conversion, "trainer.test_freq", rows)
    if every > 0 and "data.eval_files" in settings:
        settings |= {"evaluation.every": every, "evaluation.at_end": True}
    elif every < -1 and "data.eval_files" in settings:
        settings["evaluation.at_end"] = True
    translate_schedule(conversion, "actor.optimizer", optimizer, updates, megatron=megatron)


def _steps(conversion: Conversion, rows: int | None) -> None:
    if "train.steps" in conversion.settings:
        return
    option, batch = "trainer.total_epochs", conversion.settings["data.prompts_per_step"]
    if rows is None:
        product = f"rows x {conversion.get(option)} / {batch}"
        conversion.note(
            option, f"the length of a run is train.steps, which is 1 here: set it to {product}, or pass --rows"
        )
        return
    if rows < batch:
        raise InputError(f"--rows {rows}: a step has {batch} prompts (data.train_batch_size), so verl would make none")
    epochs = conversion.number(option)
    conversion.settings["train.steps"] = rows // batch * epochs
    conversion.note(option, f"train.steps={conversion.settings['train.steps']}: {epochs} x {rows} rows / {batch}")


def translate_prompts(conversion: Conversion) -> None:
    cut = conversion.get("data.truncation")
    if conversion.is_on("data.filter_overlong_prompts"):
        conversion.settings["data.overlong_prompts"] = "filter"
    elif cut not in (None, "error"):
        conversion.settings["data.overlong_prompts"] = "filter"
        conversion.note(
            "data.truncation", "no truncation: rows that are too long are filtered (data.overlong_prompts=filter)"
        )


def _check_lengths(conversion: Conversion) -> None:
    """Refuse lengths of verl's engines that differ from the lengths of prompts and responses, which megarl's engines have."""
    sides = {side: conversion.number(f"data.max_{side}_length") for side in ("prompt", "response")}
    for side, length in sides.items():
        option = f"{_R}.{side}_length"
        if option in conversion.options and conversion.number(option) != length:
            key = "data.max_prompt_length" if side == "prompt" else "rollout.max_response_length"
            reason = f"data.max_{side}_length is {length}, and engines have the same"
            conversion.leave_out(option, reason, to=key, changes=True)
    option, longest = f"{_R}.max_model_len", sum(sides.values())
    if conversion.get(option) is not None and conversion.number(option) < longest:
        reason = f"verl cuts responses there, before data.max_prompt_length + data.max_response_length = {longest}"
        conversion.leave_out(option, reason, to="rollout.max_response_length", changes=True)


def _batches(conversion: Conversion, updates: Updates, sampling: TrainerSampling, *, megatron: bool) -> None:
    settings = conversion.settings
    settings["actor.mini_batches"] = _mini_batches(conversion, f"{_A}.ppo_mini_batch_size", updates)
    context_parallel = int(settings.get("megatron.context_parallel", 1))
    longest = settings["data.max_prompt_length"] + settings["rollout.max_response_length"]
    option = f"{_A}.ppo_micro_batch_size_per_gpu"
    micro = conversion.first(option)
    size = conversion.get(f"{_A}.ulysses_sequence_parallel_size", 1)
    if not micro and conversion.get(f"{_A}.ppo_micro_batch_size"):
        option = f"{_A}.ppo_micro_batch_size"
        ranks = math.prod(map(conversion.number, sampling.trainers))
        sizes = [int(settings.get(f"megatron.{name}_parallel", 1)) for name in ("tensor", "pipeline", "context")]
        micro = max(conversion.number(option) // max(ranks // (math.prod(sizes) if megatron else size), 1), 1)
    dynamic = conversion.is_on(f"{_A}.use_dynamic_bsz")
    if dynamic or not micro:
        tokens = conversion.number(f"{_A}.ppo_max_token_len_per_gpu") * size
        settings["actor.max_tokens_per_micro_batch"] = tokens
        if not dynamic:
            reason = (
                f"not set, and use_dynamic_bsz is off, which verl refuses: actor.max_tokens_per_micro_batch is {tokens}"
            )
            conversion.note(option, f"{reason}, from ppo_max_token_len_per_gpu")
    else:
        settings["actor.max_tokens_per_micro_batch"] = -(-micro * longest // context_parallel)
        shared = f" on {context_parallel} context-parallel devices" if context_parallel > 1 else ""
        conversion.note(
            option,
            f"{micro} x {longest} tokens{shared}: actor.max_tokens_per_micro_batch",
        )


def _mini_batches(conversion: Conversion, option: str, updates: Updates) -> int:
    """Return the number of mini batches per step. `option` is the number of prompts in a mini batch."""
    batch, mini = updates.prompts, conversion.number(option)
    if mini >= batch:
        if mini > batch:
            unit = "a step" if updates.count == 1 else "an update of verl's actor"
            conversion.note(option, f"{unit} has {batch} prompts, all in one mini batch")
        return updates.count
    if batch % mini:
        raise InputError(
            f"{conversion.where(option)}{updates.origin}={batch} is not a multiple of the mini batch size {mini}"
        )
    return updates.count * (batch // mini)


def _dynamic_sampling(conversion: Conversion) -> None:
    prefix = "algorithm.filter_groups"
    if not conversion.is_on(f"{prefix}.enable"):
        conversion.drop("algorithm.dynamic_sampling.")
        if (
            conversion.get("data.gen_batch_size", 0) != conversion.get("data.train_batch_size")
            and "data.gen_batch_size" in conversion.options
        ):
            conversion.note("data.gen_batch_size", "without filter_groups, every sampled prompt is used for training")
        return
    batches = conversion.number(f"{prefix}.max_num_gen_batches", 0)
    batch = conversion.number("data.train_batch_size")
    generated = conversion.number("data.gen_batch_size", batch)
    if generated > batch:
        conversion.settings["algorithm.dynamic_sampling.oversample"] = generated / batch
    if batches > 0:
        attempts = -(-batches * generated // batch)
    else:
        attempts = 1000
        conversion.note(
            f"{prefix}.max_num_gen_batches", "a limit is required: algorithm.dynamic_sampling.max_attempts=1000"
        )
    conversion.settings["algorithm.dynamic_sampling.max_attempts"] = attempts


def _overlong(conversion: Conversion) -> None:
    for prefix in OVERLONG:
        if conversion.is_on(f"{prefix}.enable"):
            conversion.settings["algorithm.overlong.penalty_buffer"] = conversion.number(f"{prefix}.len")
            conversion.settings["algorithm.overlong.penalty_factor"] = conversion.get(f"{prefix}.penalty_factor", 1.0)
            longest = conversion.number("data.max_response_length")
            for option in LONGEST:
                if conversion.get(option) not in (None, longest):
                    reason = f"the buffer ends at data.max_response_length, which is {longest}"
                    conversion.leave_out(option, reason, to="rollout.max_response_length", changes=True)


def _validation(conversion: Conversion) -> None:
    settings, values = conversion.settings, f"{_R}.val_kwargs"
    settings["evaluation.at_start"] = conversion.is_on("trainer.val_before_train") and "data.eval_files" in settings
    if not (settings["evaluation.at_start"] or "evaluation.every" in settings):
        conversion.drop("evaluation.")
        drop_evaluation_data(conversion)
        return
    settings["evaluation.temperature"] = temperature = float(conversion.get(f"{values}.temperature", 0))
    if not temperature:
        conversion.drop("evaluation.top_p")
        if settings.pop("evaluation.samples", 1) != 1:
            conversion.note(f"{values}.n", "1: greedy samples of a prompt are equal")


def evaluates_alone(conversion: Conversion) -> bool:
    """Return whether verl ends after the evaluation before the first step (verl/trainer/ppo/ray_trainer.py:1438), unless the user
    leaves the option out."""
    on = conversion.is_on(_VAL_ONLY) and conversion.is_on("trainer.val_before_train")
    return on and _VAL_ONLY not in conversion.user_choices


def _evaluation_alone(conversion: Conversion, kind: Kind) -> None:
    """Leave the training data out of a run that only evaluates."""
    if not evaluates_alone(conversion):
        if conversion.is_on(_VAL_ONLY):
            conversion.note(_VAL_ONLY, "left out: the run trains, as in verl without val_before_train")
        return
    if kind != "synchronous" or "data.eval_files" not in conversion.settings:
        reason = "megarl eval evaluates the recipe of a synchronous run with data.val_files"
        conversion.leave_out(_VAL_ONLY, reason, changes=True)
        return
    if conversion.get("trainer.resume_mode") == "resume_path":
        conversion.leave_out("trainer.resume_mode", "megarl eval evaluates model.path", to="model.path", changes=True)
    conversion.drop("data.train_files")
    conversion.note(_VAL_ONLY, "the recipe has no training data: `python -m megarl eval RECIPE` evaluates model.path")


def drop_evaluation_data(conversion: Conversion) -> None:
    if conversion.settings.pop("data.eval_files", None) and "data.val_files" in conversion.options:
        conversion.note("data.val_files", "omitted: evaluation is off (trainer.test_freq, trainer.val_before_train)")


def _critic(conversion: Conversion, updates: Updates, *, sampling: TrainerSampling, megatron: bool) -> None:
    settings = conversion.settings
    settings["critic.trainers"] = settings["cluster.trainers"]
    warmup = settings.get("critic.warmup_steps", 0)
    if "train.steps" not in settings and warmup:  # the number of steps is unknown: see `_steps`
        settings["train.steps"] = warmup + 1
    option = "critic.ppo_mini_batch_size"
    settings["critic.mini_batches"] = (
        _mini_batches(conversion, option, updates) if option in conversion.options else settings["actor.mini_batches"]
    )
    settings["critic.epochs"] = conversion.number("critic.ppo_epochs", int(settings.get("actor.epochs", 1)))
    advance = settings["critic.mini_batches"] * settings["critic.epochs"] // updates.count
    translate_schedule(conversion, "critic.optimizer", "critic.optim", advance, megatron=megatron)
    settings["critic.max_tokens_per_micro_batch"] = settings["actor.max_tokens_per_micro_batch"]
    if size := conversion.first("critic.ulysses_sequence_parallel_size"):
        settings["critic.megatron.tensor_parallel"] = size
    translate_router_losses(conversion, "critic.megatron.", "critic.megatron")
    if settings.get("critic.megatron.expert_parallel", 1) > 1:
        of_experts = conversion.get("critic.megatron.expert_tensor_parallel_size")
        tensor = settings.get("critic.megatron.tensor_parallel", 1)
        settings["critic.megatron.expert_tensor_parallel"] = of_experts or tensor
    if offloaded(conversion, "critic.") and not sampling.engines:
        settings["critic.megatron.offload"] = True
