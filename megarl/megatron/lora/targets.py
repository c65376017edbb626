"""Check `lora.targets` against the model's config.json. Pure functions."""

from __future__ import annotations

from typing import Any

from megarl.errors import RecipeError
from megarl.hf.families import FAMILIES, family_of
from megarl.hf.linears import ALL, linears_of, linears_of_layer, matches
from megarl.megatron.layout import layers_of_chunks
from megarl.recipe.trainers import LoraConfig, MegatronConfig
from megarl.registry import nearest


def check_lora(hf_config: dict[str, Any], lora: LoraConfig, megatron: MegatronConfig) -> None:
    """Refuse targets that the model, or one pipeline stage of it, does not have. Raises RecipeError.

    `hf_config`: the model's config.json.
    """
    if not lora.rank:
        return
    if not family_of(hf_config).adapters:
        supported = ", ".join(name for name, family in FAMILIES.items() if family.adapters)
        raise RecipeError(
            "lora.rank",
            f"adapters are supported for {supported} models; this model is {hf_config['model_type']!r}",
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
            "adapters for either all three linears of an expert or none",
            f"add {missing}; or leave experts out: mlp.gate_proj, shared_experts.gate_proj, ... name the linears outside them",
            value=list(lora.targets),
        )
    for chunk in layers_of_chunks(hf_config["num_hidden_layers"], megatron):
        if not any(matches(name, lora.targets) for layer in chunk for name in linears_of_layer(hf_config, layer)):
            raise RecipeError(
                "lora.targets",
                f"layers {chunk.start} to {chunk.stop - 1}, a pipeline stage's layers, have none of them: nothing would be "
                "trained there",
                "add linears that every layer has (o_proj), or change megatron.pipeline_parallel",
                value=list(lora.targets),
            )


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _unknown(target: str, linears: list[str]) -> str:
    leaves = list(dict.fromkeys(_leaf(name) for name in linears))
    places = [".".join(name.split(".")[-2:]) for name in linears if not name.startswith("self_attn.")]
    near = nearest(target, [ALL, *leaves, *places])
    hint = f" Did you mean {near}?" if near else ""
    return f"the model has no linear {target!r}.{hint} It has {', '.join(leaves)}; by place {', '.join(places)}"
