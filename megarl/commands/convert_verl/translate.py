"""Settings that depend on several of verl's options: batches, layouts, schedules, KL, evaluation."""

from __future__ import annotations

import re
from typing import Any

from megarl.commands.convert_verl.sheet import Sheet
from megarl.commands.convert_verl.table import KL_ESTIMATORS, OVERLONG
from megarl.errors import InputError

_TRACKERS = ("wandb", "swanlab", "mlflow")
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def translate_rl(sheet: Sheet, *, megatron: bool, one_step_off: bool, rows: int | None) -> None:
    """Derive the settings of an RL run.

    megatron: verl's actor uses Megatron, not FSDP. one_step_off: sampling runs one step ahead of training.
    rows: number of rows of training data; None: unknown.
    """
    _prompts(sheet)
    _batches(sheet)
    _layout(sheet, megatron=megatron, one_step_off=one_step_off)
    _kl(sheet)
    _loss(sheet)
    _dynamic_sampling(sheet)
    _overlong(sheet)
    common(sheet, rows=rows, mini_batches=sheet.settings["actor.mini_batches"], optimizer=f"{_A}.optim")
    _validation(sheet)
    if sheet.settings.get("algorithm.advantage") == "gae":
        _critic(sheet, one_step_off=one_step_off)
    else:
        _drop(sheet, "critic.", "no critic: algorithm.advantage is not gae")


def translate_sft(sheet: Sheet, *, processes: int, rows: int | None) -> None:
    """Derive the settings of an SFT run. `processes`: torchrun's processes on all nodes; `rows`: see `translate_rl`."""
    settings = sheet.settings
    longest = sheet.number("data.max_length")
    settings |= {"train.source": "sft", "algorithm.advantage": "none", "algorithm.loss": "sft"}
    settings |= {"data.max_prompt_length": longest - longest // 2, "rollout.max_response_length": longest // 2}
    _prompts(sheet)
    size = sheet.first("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size") or 1
    if size > 1:
        settings["megatron.tensor_parallel"] = size
    if sheet.get("data.use_dynamic_bsz") is True:
        settings["actor.max_tokens_per_micro_batch"] = sheet.number("data.max_token_len_per_gpu", 8192) * size
    else:
        settings["actor.max_tokens_per_micro_batch"] = sheet.number("data.micro_batch_size_per_gpu", 4) * longest
    settings["cluster.trainers"] = processes
    if not settings.get("lora.rank"):
        _drop(sheet, "lora.", "")
    common(sheet, rows=rows, mini_batches=1, optimizer="optim")
    if "data.eval_files" in settings and not {"evaluation.every", "evaluation.at_end"} & settings.keys():
        _drop_evaluation_data(sheet)


def common(sheet: Sheet, *, rows: int | None, mini_batches: int, optimizer: str) -> None:
    """Derive settings of RL and SFT: name, trackers, number of steps, checkpoints, evaluation and warm-up.

    mini_batches: optimizer steps per training step. optimizer: prefix of the optimizer's options in verl.
    """
    settings = sheet.settings
    name = str(sheet.get("trainer.experiment_name") or "run")
    settings["name"] = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    trackers = sheet.get("trainer.logger") or []
    trackers = trackers if isinstance(trackers, list) else [trackers]
    settings["observe.trackers"] = [tracker for tracker in trackers if tracker in _TRACKERS]
    if unsupported := [tracker for tracker in trackers if tracker not in (*_TRACKERS, "console", "tensorboard")]:
        sheet.note("trainer.logger", f"no counterpart for {', '.join(map(str, unsupported))}")
    _steps(sheet, rows)
    every = sheet.number("trainer.save_freq", -1)
    settings |= {"train.save_every": every} if every > 0 else {"train.save_at_end": False}
    every = sheet.number("trainer.test_freq", -1)
    if every > 0 and "data.eval_files" in settings:
        settings |= {"evaluation.every": every, "evaluation.at_end": True}
    warmup = sheet.get(f"{optimizer}.lr_warmup_steps", -1)
    ratio = sheet.get(f"{optimizer}.lr_warmup_steps_ratio", 0)
    if isinstance(warmup, int) and warmup > 0:
        settings["actor.optimizer.warmup_steps"] = warmup * mini_batches
    elif ratio and "train.steps" in settings:
        settings["actor.optimizer.warmup_steps"] = int(ratio * settings["train.steps"] * mini_batches)
    elif ratio:
        sheet.note(
            f"{optimizer}.lr_warmup_steps_ratio", "the number of steps is unknown: set actor.optimizer.warmup_steps"
        )


def _steps(sheet: Sheet, rows: int | None) -> None:
    if "train.steps" in sheet.settings:
        return
    epochs, batch = sheet.get("trainer.total_epochs"), sheet.settings["data.prompts_per_step"]
    if rows is not None and isinstance(epochs, int):
        sheet.settings["train.steps"] = max(1, rows // batch) * epochs
        sheet.note(
            "trainer.total_epochs", f"train.steps={sheet.settings['train.steps']}: {epochs} x {rows} rows / {batch}"
        )
    else:
        sheet.note(
            "trainer.total_epochs",
            f"the length of a run is train.steps, which is 1 here: set it to rows x epochs / {batch}, or pass --rows",
        )


def _prompts(sheet: Sheet) -> None:
    cut = sheet.get("data.truncation")
    if sheet.get("data.filter_overlong_prompts") is True:
        sheet.settings["data.overlong_prompts"] = "filter"
    elif cut not in (None, "error"):
        sheet.settings["data.overlong_prompts"] = "filter"
        sheet.note(
            "data.truncation", "no truncation: rows that are too long are filtered (data.overlong_prompts=filter)"
        )


def _batches(sheet: Sheet) -> None:
    settings = sheet.settings
    settings["actor.mini_batches"] = _mini_batches(sheet, f"{_A}.ppo_mini_batch_size")
    longest = settings["data.max_prompt_length"] + settings["rollout.max_response_length"]
    micro = sheet.first(f"{_A}.ppo_micro_batch_size_per_gpu")
    size = sheet.get(f"{_A}.ulysses_sequence_parallel_size", 1)
    if sheet.get(f"{_A}.use_dynamic_bsz") is True or not micro:
        settings["actor.max_tokens_per_micro_batch"] = sheet.number(f"{_A}.ppo_max_token_len_per_gpu") * size
    else:
        settings["actor.max_tokens_per_micro_batch"] = micro * longest
        sheet.note(
            f"{_A}.ppo_micro_batch_size_per_gpu", f"{micro} x {longest} tokens: actor.max_tokens_per_micro_batch"
        )
    if sheet.get("actor_rollout_ref.model.lora_rank", 0) == 0:
        _drop(sheet, "lora.", "")


def _mini_batches(sheet: Sheet, option: str) -> int:
    """Return the number of mini batches per step. `option` is the number of prompts in a mini batch."""
    batch, mini = sheet.number("data.train_batch_size"), sheet.number(option)
    if mini >= batch:
        if mini > batch:
            sheet.note(option, f"a step has {batch} prompts, all in one mini batch")
        return 1
    if batch % mini:
        raise InputError(
            f"{sheet.where(option)}data.train_batch_size={batch} is not a multiple of the mini batch size {mini}"
        )
    return batch // mini


def _layout(sheet: Sheet, *, megatron: bool, one_step_off: bool) -> None:
    settings, get = sheet.settings, sheet.get
    trainers = sheet.number("trainer.nnodes") * sheet.number("trainer.n_gpus_per_node")
    settings["cluster.trainers"] = sampling = trainers
    offload = _offloaded(sheet, f"{_A}.")
    if one_step_off:
        sampling = sheet.number("rollout.nnodes", 1) * sheet.number("rollout.n_gpus_per_node", 8)
        settings |= {
            "cluster.placement": "disaggregated",
            "rollout.max_staleness": 1,
            "algorithm.old_log_probs": "rollout",
        }
        for name in offload:
            sheet.note(name, "trainers do not share their devices: nothing is offloaded")
    elif offload:
        settings["megatron.offload"] = True
    size = sheet.number(f"{_R}.tensor_model_parallel_size")
    if sampling % size:
        raise InputError(f"{sampling} devices are not a multiple of rollout.tensor_model_parallel_size={size}")
    settings |= {"rollout.tensor_parallel": size, "rollout.engines": sampling // size}
    if sheet.number(f"{_R}.expert_parallel_size", 1) > 1 and settings.get("rollout.data_parallel", 1) == 1:
        settings["rollout.expert_parallel"] = True
    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing"
    if megatron:
        if sheet.origins.get("megatron.recompute") == checkpointing:
            del settings["megatron.recompute"]
            sheet.note(
                checkpointing, "verl's Megatron actor ignores it and uses override_transformer_config.recompute_*"
            )
        if settings.get("megatron.expert_parallel", 1) > 1:
            size_of_experts = get(f"{_A}.megatron.expert_tensor_parallel_size")
            settings["megatron.expert_tensor_parallel"] = size_of_experts or settings.get("megatron.tensor_parallel", 1)
        return
    settings.setdefault("megatron.recompute", "full")
    size = sheet.number(f"{_A}.ulysses_sequence_parallel_size", 1)
    settings["megatron.tensor_parallel"] = size
    if size > 1:
        sheet.note(
            f"{_A}.ulysses_sequence_parallel_size", f"megatron.tensor_parallel={size}, which also splits sequences"
        )
    else:
        sheet.notes.append(
            "the actor uses FSDP: megatron.tensor_parallel is 1, so each device holds all weights and gradients; raise it "
            "if these do not fit"
        )


def _kl(sheet: Sheet) -> None:
    settings, get = sheet.settings, sheet.get
    in_loss, in_reward = get(f"{_A}.use_kl_loss") is True, get("algorithm.use_kl_in_reward") is True
    if in_loss and in_reward:
        raise InputError(
            "use_kl_loss and use_kl_in_reward are both True; megarl has one KL term, in the loss or in the reward"
        )
    if in_loss:
        kind = str(get(f"{_A}.kl_loss_type"))
        settings["algorithm.kl_coef"] = get(f"{_A}.kl_loss_coef")
        settings["algorithm.kl_straight_through"] = kind.endswith("+")
        settings["algorithm.kl_estimator"] = _estimator(sheet, f"{_A}.kl_loss_type", kind.removesuffix("+"))
    elif in_reward:
        settings["algorithm.kl_in_reward"] = True
        settings["algorithm.kl_coef"] = get("algorithm.kl_ctrl.kl_coef")
        settings["algorithm.kl_estimator"] = _estimator(sheet, "algorithm.kl_penalty", str(get("algorithm.kl_penalty")))
        if get("algorithm.kl_ctrl.type") == "adaptive":
            settings["algorithm.kl_target"] = get("algorithm.kl_ctrl.target_kl", 0.1)
            settings["algorithm.kl_horizon"] = get("algorithm.kl_ctrl.horizon", 10000)
    if not in_reward:
        for name in sheet.options:
            if name.startswith("algorithm.kl_ctrl."):
                sheet.note(name, "verl ignores it without use_kl_in_reward")
    if not settings.get("algorithm.kl_coef"):
        _drop(sheet, "algorithm.kl_", "")


def _estimator(sheet: Sheet, option: str, kind: str) -> str:
    if kind not in KL_ESTIMATORS:
        supported = ", ".join(KL_ESTIMATORS)
        raise InputError(f"{sheet.where(option)}{option}={kind} has no counterpart; supported: {supported}")
    return str(KL_ESTIMATORS[kind])


def _loss(sheet: Sheet) -> None:
    """Set the values that verl's loss fixes, and its defaults."""
    settings, loss = sheet.settings, sheet.settings.get("algorithm.loss")
    if loss in ("gspo", "sapo", "gmpo"):
        if f"{_A}.loss_agg_mode" in sheet.options and settings.get("algorithm.aggregation") != "seq_mean_token_mean":
            sheet.note(f"{_A}.loss_agg_mode", f"not used: verl's {loss} always has seq-mean-token-mean")
        settings["algorithm.aggregation"] = "seq_mean_token_mean"
    if (
        loss == "gspo"
        and settings.pop("algorithm.dual_clip", None) is not None
        and f"{_A}.clip_ratio_c" in sheet.options
    ):
        sheet.note(f"{_A}.clip_ratio_c", "not used: verl's gspo has no dual clip")
    if settings.get("algorithm.advantage") == "gpg":
        sheet.note(
            "algorithm.adv_estimator", "alpha is the paper's: verl counts non-zero scores instead (docs/algorithms.md)"
        )
    if loss == "kl_cov":
        settings.setdefault("algorithm.cov_share", 2e-4)
        settings.setdefault("algorithm.cov_kl_coef", 0.1)


def _dynamic_sampling(sheet: Sheet) -> None:
    prefix = "algorithm.filter_groups"
    if sheet.get(f"{prefix}.enable") is not True:
        _drop(sheet, "algorithm.dynamic_sampling.", "")
        if (
            sheet.get("data.gen_batch_size", 0) != sheet.get("data.train_batch_size")
            and "data.gen_batch_size" in sheet.options
        ):
            sheet.note("data.gen_batch_size", "without filter_groups, every sampled prompt is used for training")
        return
    batches = sheet.number(f"{prefix}.max_num_gen_batches", 0)
    batch = sheet.number("data.train_batch_size")
    if batches > 0:
        attempts = -(-batches * sheet.number("data.gen_batch_size", batch) // batch)
    else:
        attempts = 1000
        sheet.note(f"{prefix}.max_num_gen_batches", "a limit is required: algorithm.dynamic_sampling.max_attempts=1000")
    sheet.settings["algorithm.dynamic_sampling.max_attempts"] = attempts


def _overlong(sheet: Sheet) -> None:
    for prefix in OVERLONG:
        if sheet.get(f"{prefix}.enable") is True:
            sheet.settings["algorithm.overlong.penalty_buffer"] = sheet.number(f"{prefix}.len")
            sheet.settings["algorithm.overlong.penalty_factor"] = sheet.get(f"{prefix}.penalty_factor", 1.0)


def _validation(sheet: Sheet) -> None:
    settings, values = sheet.settings, f"{_R}.val_kwargs"
    settings["evaluation.at_start"] = sheet.get("trainer.val_before_train") is True and "data.eval_files" in settings
    if not (settings["evaluation.at_start"] or "evaluation.every" in settings):
        _drop(sheet, "evaluation.", "")
        _drop_evaluation_data(sheet)
        return
    sampled = sheet.get(f"{values}.do_sample") is True
    settings["evaluation.temperature"] = float(sheet.get(f"{values}.temperature", 0)) if sampled else 0.0
    if not sampled:
        _drop(sheet, "evaluation.top_p", "")


def _drop_evaluation_data(sheet: Sheet) -> None:
    if sheet.settings.pop("data.eval_files", None) and "data.val_files" in sheet.options:
        sheet.note("data.val_files", "omitted: evaluation is off (trainer.test_freq, trainer.val_before_train)")


def _critic(sheet: Sheet, *, one_step_off: bool) -> None:
    settings = sheet.settings
    settings["critic.trainers"] = settings["cluster.trainers"]
    option = "critic.ppo_mini_batch_size"
    settings["critic.mini_batches"] = (
        _mini_batches(sheet, option) if option in sheet.options else settings["actor.mini_batches"]
    )
    settings["critic.max_tokens_per_micro_batch"] = settings["actor.max_tokens_per_micro_batch"]
    if size := sheet.first("critic.ulysses_sequence_parallel_size"):
        settings["critic.megatron.tensor_parallel"] = size
    if _offloaded(sheet, "critic.") and not one_step_off:
        settings["critic.megatron.offload"] = True


def _offloaded(sheet: Sheet, prefix: str) -> list[str]:
    """Return the command's offload options below `prefix` that are on."""
    return [
        name
        for name, option in sheet.options.items()
        if name.startswith(prefix) and name.endswith("_offload") and option.value
    ]


def _drop(sheet: Sheet, prefix: str, reason: str) -> None:
    """Remove the settings that start with `prefix`. With a reason, add a note for each."""
    dropped: list[Any] = [key for key in sheet.settings if key.startswith(prefix)]
    for key in dropped:
        value = sheet.settings.pop(key)
        if reason and value:
            sheet.notes.append(f"{key}={value}: omitted, {reason}")
