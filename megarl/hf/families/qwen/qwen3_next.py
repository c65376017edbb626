"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the fourth, a mixture of experts in all."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import Family
from megarl.hf.families.qwen.text import every_few, one_expert_per_token
from megarl.hf.families.rows import DELTA_NET, DENSE, EXPERTS, GATED_ATTENTION, MODEL, in_layers, row, shared_experts
from megarl.hf.families.settings import mixture
from megarl.hf.families.slices import Config, copy, delta_by_head

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
    """Return Megatron's fields for attention with gated output and norms that add 1 to their weight, in some of the layers.

    Checkpoints name each layer: Megatron would otherwise store a parameter of all layers as one tensor.
    """
    fields = ("qk_layernorm", "attention_output_gate", "layernorm_zero_centered_gamma", "hetereogenous_dist_checkpoint")
    return dict.fromkeys(fields, True)


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


QWEN3_NEXT = Family(
    (*MODEL, *GATED_ATTENTION, *DELTA_NET, *_BY_HEAD, *DENSE, *EXPERTS, *GATED_SHARED_EXPERT),
    _settings,
    sparse=every_few,
    unsupported=one_expert_per_token,
    rotary=("default",),
    delta_nets=True,
)
