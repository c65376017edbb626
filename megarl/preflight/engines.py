"""Checks of engines: names, arguments, groups and parallel sizes."""

from __future__ import annotations

from typing import Any

from megarl import engines
from megarl.engines.vllm import quantization
from megarl.errors import RecipeError
from megarl.hf.config import number_of_experts, text_fields
from megarl.recipe.judge import JudgeConfig, TeacherConfig
from megarl.recipe.schema import RolloutConfig


def check_engines(rollout: RolloutConfig) -> None:
    """Raise ValueError for an unknown engine, unknown arguments, and engine groups that the engine does not support."""
    check_engine("rollout", rollout)
    engines.check_groups(rollout.engine, rollout.data_parallel)


def check_engine(section: str, settings: RolloutConfig | TeacherConfig | JudgeConfig) -> None:
    """Raise ValueError for an unknown engine or unknown arguments. `settings`: the section `section` of the recipe."""
    engines.check_name(settings.engine, f"{section}.engine")
    engines.arguments_of(settings.engine).check_engine_args(settings.engine_args, section)


def overrides_config(settings: RolloutConfig | TeacherConfig | JudgeConfig) -> bool:
    """Return whether the recipe overrides fields of config.json in this engine: its context may then be longer."""
    return engines.arguments_of(settings.engine).OVERRIDES in settings.engine_args


def check_experts(rollout: RolloutConfig, config: dict[str, Any]) -> None:
    """Raise RecipeError if experts do not divide over the devices of an engine or an engine group. `config`: config.json."""
    if not rollout.spreads_experts:
        return
    key, value = ("data_parallel", rollout.data_parallel) if rollout.data_parallel > 1 else ("expert_parallel", True)
    experts, devices = number_of_experts(text_fields(config)), rollout.data_parallel * rollout.tensor_parallel
    if not experts:
        remedy = "leave it out: each engine is an independent replica"
        raise RecipeError(f"rollout.{key}", "the model has no experts to spread", remedy, value=value)
    if experts % devices:
        raise RecipeError(
            f"rollout.{key}",
            f"the model's {experts} experts do not divide over rollout.data_parallel x rollout.tensor_parallel = "
            f"{rollout.data_parallel} x {rollout.tensor_parallel} = {devices} devices",
            "change one of the two so that they divide",
            value=value,
        )


def check_quantization(rollout: RolloutConfig, config: dict[str, Any]) -> None:
    """Raise RecipeError if the model cannot be quantized as `rollout.quantization` says. `config`: config.json."""
    if rollout.quantization is not None and rollout.engine == "vllm":
        quantization.check_model(config, rollout.tensor_parallel, spread=rollout.spreads_experts)


def check_heads(
    section: str, settings: RolloutConfig | TeacherConfig | JudgeConfig, config: dict[str, Any], *, spread: bool = False
) -> None:
    """Raise RecipeError if attention heads or widths do not divide over the devices of an engine.

    `settings`: the section `section` of the recipe. `config`: config.json. `spread`: each device has whole experts.
    """
    tensor_parallel, text = settings.tensor_parallel, text_fields(config)
    heads, groups = text["num_attention_heads"], text.get("num_key_value_heads") or 0
    key = f"{section}.tensor_parallel"
    if heads % tensor_parallel:
        problem = f"the model's {heads} attention heads do not divide over an engine's {tensor_parallel} devices"
        raise RecipeError(key, problem, f"choose a divisor of {heads}", value=tensor_parallel)
    if groups and not text.get("kv_lora_rank") and groups % tensor_parallel and tensor_parallel % groups:
        problem = f"the model's {groups} key/value heads are neither a divisor nor a multiple of an engine's {tensor_parallel} devices"
        raise RecipeError(key, problem, f"choose a divisor or a multiple of {groups}", value=tensor_parallel)
    experts = number_of_experts(text)
    name = "moe_intermediate_size" if experts else "intermediate_size"
    width = text.get(name) or 0
    arguments = engines.arguments_of(settings.engine)
    split, argument = arguments.expert_split(settings.engine_args, tensor_parallel)
    parts = split if experts else tensor_parallel
    if width % parts and not (experts and spread):
        problem = f"the model's {name} of {width} does not divide over {parts} devices of an engine"
        whole = "rollout.expert_parallel=true" if section == "rollout" else f"{section}.engine_args.{argument}"
        remedy = f"choose a divisor of {width}" + (f", or set {whole}" if experts else "")
        raise RecipeError(key, problem, remedy, value=tensor_parallel)
