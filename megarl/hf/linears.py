"""Hugging Face names of the linears in a model's layers, and which of them have adapters. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarl.hf.config import text_fields, with_experts
from megarl.hf.families import family_of
from megarl.hf.families.sizes import layer_parameters

ALL = "all-linear"
_MLP = ("gate_proj", "up_proj", "down_proj")
_WITHOUT = ("mlp.router.weight", "mlp.shared_experts.gate_weight")  # small, and not linears of Megatron


def linears_of_layer(hf_config: dict[str, Any], layer: int) -> list[str]:
    """Return the names, within one layer, of its linears that can have an adapter, without expert numbers."""
    family, config = family_of(hf_config), text_fields(hf_config)
    names = [
        name
        for row, shape in layer_parameters(family, {**config, **with_experts(config, 1)}, layer)
        if len(shape) == 2 and not row.parameter.endswith(_WITHOUT)
        for name in row.tensors
    ]
    return [without_expert(name).split(".", 3)[3].removesuffix(".weight") for name in names]


def linears_of(hf_config: dict[str, Any]) -> list[str]:
    """Return the names, within a layer, of all linears that can have an adapter in some layer."""
    family, config = family_of(hf_config), text_fields(hf_config)
    sparse = [family.sparse(config, layer) for layer in range(config["num_hidden_layers"])]
    layers = [sparse.index(kind) for kind in (True, False) if kind in sparse]
    return list(dict.fromkeys(name for layer in layers for name in linears_of_layer(hf_config, layer)))


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
