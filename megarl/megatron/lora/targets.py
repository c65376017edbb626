"""Which linears `lora.targets` means. Pure: a recipe is checked against config.json before anything starts."""

from __future__ import annotations

import re
from typing import Any

from megarl.config.errors import RecipeError
from megarl.config.training import LoraConfig, MegatronConfig
from megarl.megatron.layout import layers_of_chunks
from megarl.model_config import number_of_experts
from megarl.registry import nearest

ALL = "all-linear"
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
_MLP = ("gate_proj", "up_proj", "down_proj")


def check_lora(hf_config: dict[str, Any], lora: LoraConfig, megatron: MegatronConfig) -> None:
    """Refuse targets that the model of config.json `hf_config`, or a part of it that a process holds, does not have.
    Raises RecipeError."""
    if not lora.rank:
        return
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise RecipeError(
            "lora.rank",
            f"adapters are known for {', '.join(FAMILIES)} models; this one is {family!r}",
            "set lora.rank=0 to train all weights",
            value=lora.rank,
        )
    linears = linears_of(hf_config)
    for target in lora.targets:
        if target != ALL and not any(matches(name, [target]) for name in linears):
            raise RecipeError("lora.targets", _unknown(target, linears), "choose from these", value=list(lora.targets))
    experts = [name for name in linears if ".experts." in name]
    chosen = [name for name in experts if matches(name, lora.targets)]
    if 0 < len(chosen) < len(experts):
        missing = ", ".join(sorted({_leaf(name) for name in experts} - {_leaf(name) for name in chosen}))
        raise RecipeError(
            "lora.targets",
            f"the experts' {', '.join(_leaf(name) for name in chosen)} would be adapted without their {missing}: PEFT reads "
            "adapters of all three of an expert's linears, or of none",
            f"add {missing}; or leave experts out: mlp.gate_proj, shared_experts.gate_proj, ... name the linears outside them",
            value=list(lora.targets),
        )
    for chunk in layers_of_chunks(hf_config["num_hidden_layers"], megatron):
        if not any(matches(name, lora.targets) for layer in chunk for name in linears_of_layer(hf_config, layer)):
            raise RecipeError(
                "lora.targets",
                f"layers {chunk.start} to {chunk.stop - 1}, which pipeline stages hold by themselves, have none of them: "
                "nothing would be trained there",
                "add linears that every layer has (o_proj), or change megatron.pipeline_parallel",
                value=list(lora.targets),
            )


def linears_of_layer(hf_config: dict[str, Any], layer: int) -> list[str]:
    """Those of `linears_of` that one layer has: leading dense layers have no experts, and others no dense MLP."""
    dense = layer < (hf_config.get("first_k_dense_replace") or 0)
    absent: tuple[str, ...] = ("mlp.experts.", "mlp.shared_experts.") if dense else ()
    if not dense and number_of_experts(hf_config):
        absent = tuple(f"mlp.{name}" for name in _MLP)
    return [name for name in linears_of(hf_config) if not name.startswith(absent)]


def linears_of(hf_config: dict[str, Any]) -> list[str]:
    """Every linear that can be adapted, by its name within a layer, without an expert's number."""
    if hf_config.get("kv_lora_rank"):
        query = ["q_a_proj", "q_b_proj"] if hf_config.get("q_lora_rank") else ["q_proj"]
        attention = [*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    else:
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    parents = ["mlp.experts."] if number_of_experts(hf_config) else ["mlp."]
    if hf_config.get("first_k_dense_replace"):
        parents.append("mlp.")
    if hf_config.get("n_shared_experts"):
        parents.append("mlp.shared_experts.")
    return [f"self_attn.{name}" for name in attention] + [parent + name for parent in parents for name in _MLP]


def matches(name: str, targets: list[str]) -> bool:
    """Whether one of `targets` is the linear `name` or the end of it, an expert's number left out.

    Example: "model.layers.0.mlp.experts.7.up_proj" is meant by up_proj, experts.up_proj and mlp.experts.up_proj.
    """
    name = without_expert(name)
    return any(target in (ALL, name) or name.endswith(f".{target}") for target in targets)


def without_expert(name: str) -> str:
    """`name` without an expert's number: model.layers.0.mlp.experts.7.up_proj -> model.layers.0.mlp.experts.up_proj."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _unknown(target: str, linears: list[str]) -> str:
    leaves = list(dict.fromkeys(_leaf(name) for name in linears))
    places = [".".join(name.split(".")[-2:]) for name in linears if not name.startswith("self_attn.")]
    near = nearest(target, [ALL, *leaves, *places])
    hint = f" Did you mean {near}?" if near else ""
    return f"the model has no linear {target!r}.{hint} It has {', '.join(leaves)}; by place {', '.join(places)}"
