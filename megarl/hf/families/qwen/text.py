"""Qwen2, Qwen2.5, Qwen3, and their mixtures of experts."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import ATTENTION, DENSE, EXPERTS, MODEL, in_layers, row, shared_experts
from megarl.hf.families.settings import mixture
from megarl.hf.families.slices import Config, copy


def _qwen2(config: Config) -> dict[str, Any]:
    return {"add_qkv_bias": True}


def _qwen3(config: Config) -> dict[str, Any]:
    return {"qk_layernorm": True}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {
        **mixture(config),
        "qk_layernorm": True,
        # Weights from the softmax over all experts, if they are not normalized over the chosen ones.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def _qwen2_moe(config: Config) -> dict[str, Any]:
    return {
        **mixture(config),
        "add_qkv_bias": config.get("qkv_bias", True),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def every_few(config: Config, layer: int) -> bool:
    """Return whether a layer is a mixture of experts. Some models have one only every few layers."""
    dense = layer in (config.get("mlp_only_layers") or [])
    return not dense and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def one_expert_per_token(config: Config) -> Refusals:
    """Refuse models with one expert per token: Megatron does not normalize the weight of a single expert."""
    yield config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"


QWEN2 = Family((*MODEL, *ATTENTION, *DENSE), _qwen2, biased=True, adapters=True)
QWEN3 = Family((*MODEL, *ATTENTION, *DENSE), _qwen3, adapters=True)
QWEN3_MOE = Family(
    (*MODEL, *ATTENTION, *DENSE, *EXPERTS),
    _qwen3_moe,
    sparse=every_few,
    unsupported=one_expert_per_token,
    adapters=True,
)
QWEN2_MOE = Family(
    (
        *MODEL,
        *ATTENTION,
        *DENSE,
        *EXPERTS,
        *shared_experts("shared_expert"),
        *in_layers(row(copy, "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight")),
    ),
    _qwen2_moe,
    sparse=every_few,
    unsupported=one_expert_per_token,
    biased=True,
)
