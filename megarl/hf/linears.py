"""Hugging Face names of the linears in a model's layers, and which of them have adapters. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarl.hf.config import number_of_experts

ALL = "all-linear"
_MLP = ("gate_proj", "up_proj", "down_proj")


def linears_of_layer(hf_config: dict[str, Any], layer: int) -> list[str]:
    """Return the linears of one layer: leading dense layers have no experts, sparse layers no dense MLP."""
    dense = layer < (hf_config.get("first_k_dense_replace") or 0)
    absent: tuple[str, ...] = ("mlp.experts.", "mlp.shared_experts.") if dense else ()
    if not dense and number_of_experts(hf_config):
        absent = tuple(f"mlp.{name}" for name in _MLP)
    return [name for name in linears_of(hf_config) if not name.startswith(absent)]


def linears_of(hf_config: dict[str, Any]) -> list[str]:
    """Return the names, within a layer, of all linears that can have an adapter, without expert numbers."""
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


def matches(name: str, targets: Sequence[str]) -> bool:
    """Return True if one of `targets` equals the linear `name`, or a suffix of it, without its expert number.

    Example: up_proj, experts.up_proj and mlp.experts.up_proj match "model.layers.0.mlp.experts.7.up_proj".
    """
    name = without_expert(name)
    return any(target in (ALL, name) or name.endswith(f".{target}") for target in targets)


def without_expert(name: str) -> str:
    """Drop the expert number: model.layers.0.mlp.experts.7.up_proj -> model.layers.0.mlp.experts.up_proj."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


def adapter_sizes(config: dict[str, Any], rank: int, targets: Sequence[str]) -> dict[str, int]:
    """Return the elements of A and B together of each adapter of a dense model, by the linear's full name.

    `config`: from `text_fields`. `targets`: see `matches`.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    attention = {"q_proj": heads, "k_proj": groups, "v_proj": groups, "o_proj": heads}
    widths = {f"self_attn.{name}": hidden + count * head for name, count in attention.items()}
    widths |= {f"mlp.{name}": hidden + (config.get("intermediate_size") or 0) for name in _MLP}
    return {
        f"model.layers.{layer}.{name}": rank * widths[name]
        for layer in range(config["num_hidden_layers"])
        for name in linears_of_layer(config, layer)
        if matches(name, targets)
    }
