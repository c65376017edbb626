"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the fourth, a mixture of experts in all."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import DENSE, EXPERTS, MODEL, Family, Refusals, in_layers, mixture, row, shared_experts
from megarl.hf.families.qwen import every_few
from megarl.hf.families.slices import Config, copy, delta_by_head, delta_convolution, gated_qkv

GATED_ATTENTION = in_layers(
    row(copy, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    row(gated_qkv, "self_attention.linear_qkv.weight", *(f"self_attn.{name}_proj.weight" for name in "qkv")),
    row(copy, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    row(copy, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    row(copy, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
DELTA_NET = in_layers(
    row(copy, "self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
    row(delta_convolution, "self_attention.convolution", "linear_attn.conv1d.weight"),
    row(copy, "self_attention.A_log", "linear_attn.A_log"),
    row(copy, "self_attention.dt_bias", "linear_attn.dt_bias"),
    row(copy, "self_attention.norm", "linear_attn.norm.weight"),
    row(copy, "self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
)
_BY_HEAD = in_layers(
    row(
        delta_by_head,
        "self_attention.in_proj.weight",
        "linear_attn.in_proj_qkvz.weight",
        "linear_attn.in_proj_ba.weight",
    )
)
GATED_SHARED_EXPERT = (
    *shared_experts("shared_expert"),
    *in_layers(row(copy, "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight")),
)


def gated_attention(config: Config) -> dict[str, Any]:
    """Return Megatron's fields for attention with gated output and norms that add 1 to their weight."""
    return {"qk_layernorm": True, "attention_output_gate": True, "layernorm_zero_centered_gamma": True}


def gated_mixture(config: Config) -> dict[str, Any]:
    """Return Megatron's fields for experts with a gated shared expert."""
    return {
        **mixture(config),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def _settings(config: Config) -> dict[str, Any]:
    return {**gated_attention(config), **gated_mixture(config)}


def _unsupported(config: Config) -> Refusals:
    yield config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"


QWEN3_NEXT = Family(
    (*MODEL, *GATED_ATTENTION, *DELTA_NET, *_BY_HEAD, *DENSE, *EXPERTS, *GATED_SHARED_EXPERT),
    _settings,
    sparse=every_few,
    unsupported=_unsupported,
    rotary=("default",),
    delta_nets=True,
)
