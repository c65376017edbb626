"""GLM-4.5, 4.6 and 4.7, and GLM-4.7-Flash, which has DeepSeek-V3's architecture with the kind of each layer in config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.hf.families.deepseek_v3 import DEEPSEEK_V3
from megarl.hf.families.family import Family, Refusals, after_the_first
from megarl.hf.families.rows import ATTENTION, DENSE, EXPERTS, MODEL, ROUTING_BIAS, shared_experts
from megarl.hf.families.settings import mixture, sigmoid_routing
from megarl.hf.families.slices import Config


def _settings(config: Config) -> dict[str, Any]:
    return {
        **mixture(config),
        **sigmoid_routing(config),
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config.get("n_shared_experts", 1),
        "moe_shared_expert_overlap": True,
        "qk_layernorm": bool(config.get("use_qk_norm")),
        "add_qkv_bias": bool(config.get("attention_bias")),
    }


def _unsupported(config: Config) -> Refusals:
    yield config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"
    yield not config.get("norm_topk_prob", True), "norm_topk_prob: false"
    yield not config.get("n_shared_experts", 1), "no shared experts (n_shared_experts)"
    yield (config.get("n_group") or 1) > 1, "groups of experts (n_group)"


def _sparse(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return kinds[layer] == "sparse" if kinds else layer >= config.get("first_k_dense_replace", 1)


GLM4_MOE = Family(
    (*MODEL, *ATTENTION, *DENSE, *EXPERTS, *shared_experts("shared_experts"), *ROUTING_BIAS),
    _settings,
    sparse=after_the_first,
    unsupported=_unsupported,
    rotary=("default",),
    ties=False,
    biased=True,
    adapters=True,
)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, sparse=_sparse)
