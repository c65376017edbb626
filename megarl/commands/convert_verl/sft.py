"""Supervised training: the options of verl's SFT trainers and the settings that depend on several of them."""

from __future__ import annotations

from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.inputs import translate_sft_columns
from megarl.commands.convert_verl.option import Option, no_counterpart
from megarl.commands.convert_verl.table import (
    ALWAYS,
    SAME_NAME,
    ULYSSES,
    layout_options,
    lite_options,
    optimizer_overrides,
)
from megarl.commands.convert_verl.trainers import translate_router_losses
from megarl.commands.convert_verl.translate import common, drop_evaluation_data, translate_prompts

_SCHEDULES = {"cosine": "cosine", "constant": "constant"}

SFT = [
    Option("model.partial_pretrain", "model.path"),
    Option("model.path", "model.path"),
    Option("data.train_files", "data.train_files"),
    Option("data.val_files", "data.eval_files"),
    Option("data.train_batch_size", "data.prompts_per_step"),
    Option("data.max_length", "data.max_prompt_length, rollout.max_response_length", "the sum of the two is the limit for an example", derived=True),
    Option("data.truncation", "data.overlong_prompts", "error is error; examples are never truncated: left and right become filter", derived=True),
    Option("data.micro_batch_size_per_gpu", "actor.max_tokens_per_micro_batch", "x data.max_length, unless use_dynamic_bsz is True", derived=True),
    Option("data.max_token_len_per_gpu", "actor.max_tokens_per_micro_batch", "x the sequence-parallel size", derived=True),
    Option("data.use_dynamic_bsz", "actor.max_tokens_per_micro_batch", "selects one of the two options above", derived=True),
    Option("data.prompt_key", "data.columns.prompt", "with data.prompt_dict_keys: the field of it", derived=True),
    Option("data.prompt_dict_keys", "data.columns.prompt", "the field of data.prompt_key", derived=True),
    Option("data.response_key", "data.columns.response", "with data.response_dict_keys: the field of it", derived=True),
    Option("data.response_dict_keys", "data.columns.response", "the field of data.response_key", derived=True),
    Option("data.messages_key", "data.columns.messages", derived=True),
    Option("data.multiturn.messages_key", "data.columns.messages", derived=True),
    Option("data.tools_key", "data.columns.tools", derived=True),
    *no_counterpart("columns messages, or prompt and response, of the file decide", "data.multiturn.*"),
    *no_counterpart("the preparation of rows has no setting", "data.ignore_input_ids_mismatch", "data.pad_mode", "data.num_workers"),
    *no_counterpart("micro batches are measured in tokens", "data.micro_batch_size"),
    *no_counterpart("the order of samples within a batch does not matter", "data.balance_dp_token"),
    Option("data.val_max_samples", "evaluation.limit", "-1 is all rows", derived=True),
    *no_counterpart("every row is used", "data.train_max_samples", same=(-1,), changes=True),
    *no_counterpart("megarl has no counterpart", "model.mtp.enable", same=(False,), changes=True),
    *no_counterpart("it belongs to mtp", "model.mtp.*"),
    *no_counterpart("a class of demonstrations tokenizes them: write their messages as docs/data.md describes", "data.custom_cls.*", same=(None,), changes=True),
    Option("data.apply_chat_template_kwargs", "data.chat_template_args"),
    Option("data.apply_chat_template_kwargs.*", "data.chat_template_args.*", SAME_NAME),
    Option("optim.lr", "actor.optimizer.lr"),
    Option("optim.betas", "actor.optimizer.betas"),
    Option("optim.weight_decay", "actor.optimizer.weight_decay"),
    Option("optim.clip_grad", "actor.optimizer.clip_grad"),
    Option("optim.min_lr_ratio", "actor.optimizer.min_lr_ratio"),
    *(Option(f"optim.{name}", "actor.optimizer.decay", names=_SCHEDULES) for name in ("lr_scheduler", "lr_scheduler_type", "warmup_style")),
    Option("optim.lr_decay_style", "actor.optimizer.decay", names={**_SCHEDULES, "linear": "linear"}),
    Option("optim.lr_decay_steps", "actor.optimizer.decay_steps", "without a decay it has no effect", derived=True),
    Option("optim.min_lr", "actor.optimizer.min_lr_ratio", "divided by lr; without a decay it has no effect", derived=True),
    Option("optim.init_lr_ratio", "actor.optimizer.init_lr_ratio", derived=True),
    Option("optim.lr_warmup_init", "actor.optimizer.init_lr_ratio", "divided by lr", derived=True),
    *no_counterpart("AdamW is the only optimizer", "optim.optimizer", same=("AdamW", "adamw", "adam", "FusedAdam"), changes=True),
    *no_counterpart("it selects one of verl's implementations", "optim.optimizer_impl"),
    *no_counterpart("moments and master weights are float32", *(f"optim.{name}" for name in ("master_weights", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"))),
    *optimizer_overrides("optim", "optimizer states in host memory: actor.optimizer.extra.optimizer_cpu_offload or megatron.extra.swap_optimizer, depending on the device"),
    Option("optim.lr_warmup_steps", "actor.optimizer.warmup_steps"),
    Option("optim.lr_warmup_steps_ratio", "actor.optimizer.warmup_steps", "x train.steps", derived=True),
    Option("model.lora_rank", "lora.rank"),
    Option("model.lora_alpha", "lora.alpha"),
    Option("model.target_modules", "lora.targets"),
    Option("model.enable_gradient_checkpointing", "megatron.recompute", names={True: "full", False: "none"}),
    Option("ulysses_sequence_parallel_size", "megatron.tensor_parallel", ULYSSES, derived=True),
    Option("engine.ulysses_sequence_parallel_size", "megatron.tensor_parallel", ULYSSES, derived=True),
    *layout_options("engine.", "megatron"),
    *lite_options("engine.", "megatron"),
    *no_counterpart(ALWAYS, "use_remove_padding", "model.use_remove_padding", same=(True,)),
    *no_counterpart("megarl trains with Megatron", "model.strategy", "engine", "engine.strategy", "model.fsdp_config.*", "engine.*", "optim", "model.use_liger", "model", "model.trust_remote_code"),
]  # fmt: skip

_ENGINES: dict[str, Any] = {
    "data.train_batch_size": 256, "data.max_length": 1024, "data.max_token_len_per_gpu": 8192, "data.use_dynamic_bsz": True,
    "data.truncation": "error", "optim.lr": 1e-3, "model.lora_alpha": 16, "model.enable_gradient_checkpointing": True,
    "trainer.seed": 1, "trainer.save_freq": -1, "trainer.resume_mode": "auto", "trainer.total_epochs": 4,
}  # fmt: skip
SFT_DEFAULTS: dict[str, dict[str, Any]] = {
    "fsdp_sft_trainer": {
        "data.train_batch_size": 256, "data.max_length": 1024, "data.micro_batch_size_per_gpu": 4, "data.truncation": "error",
        "data.prompt_key": "question", "data.response_key": "answer",
        "optim.lr": 1e-5, "optim.betas": [0.9, 0.95], "optim.lr_warmup_steps_ratio": 0.1, "optim.lr_scheduler": "cosine",
        "model.lora_alpha": 16, "model.enable_gradient_checkpointing": True, "trainer.seed": 1, "trainer.save_freq": -1,
        "trainer.resume_mode": "auto", "trainer.total_epochs": 4,
    },
    "sft_trainer": _ENGINES,
    "sft_trainer_ray": _ENGINES | {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1},
}  # fmt: skip
"""verl's defaults, by training module."""

OPTIM_DEFAULTS: dict[str, dict[str, Any]] = {
    "automodel": {"optim.lr": 1e-5, "optim.init_lr_ratio": 0.1, "optim.min_lr_ratio": 0.01, "optim.lr_scheduler_type": "cosine"},
    "veomni": {"optim.lr_scheduler_type": "cosine"},
}  # fmt: skip
"""Defaults of verl/trainer/config/optim/, by the value of the option `optim`."""


def translate_sft(conversion: Conversion, *, processes: int | str, rows: int | None) -> None:
    """Derive the settings of an SFT run. `processes`: of all nodes, or OPEN; `rows`: see `translate_rl`."""
    settings, get = conversion.settings, conversion.get
    longest = conversion.number("data.max_length")
    settings |= {"train.source": "sft", "algorithm.advantage": "none", "algorithm.loss": "sft"}
    settings |= {"data.max_prompt_length": longest - longest // 2, "rollout.max_response_length": longest // 2}
    translate_prompts(conversion)
    translate_sft_columns(conversion)
    size = conversion.first("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size") or 1
    if size > 1:
        settings["megatron.tensor_parallel"] = size
    if settings.get("megatron.expert_parallel", 1) > 1:
        of_experts = conversion.first("engine.expert_tensor_parallel_size", "engine.etp")
        settings["megatron.expert_tensor_parallel"] = of_experts or settings.get("megatron.tensor_parallel", 1)
    translate_router_losses(conversion, "engine.", "megatron")
    if conversion.is_on("data.use_dynamic_bsz"):
        settings["actor.max_tokens_per_micro_batch"] = conversion.number("data.max_token_len_per_gpu", 8192) * size
    else:
        settings["actor.max_tokens_per_micro_batch"] = conversion.number("data.micro_batch_size_per_gpu", 4) * longest
    settings["cluster.trainers"] = processes
    if not settings.get("lora.rank"):
        conversion.drop("lora.")
    common(conversion, rows=rows, updates=1, optimizer="optim", megatron=get("engine") == "megatron")
    if "data.eval_files" in settings and not {"evaluation.every", "evaluation.at_end"} & settings.keys():
        drop_evaluation_data(conversion)
