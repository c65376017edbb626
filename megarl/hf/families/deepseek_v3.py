"""DeepSeek-V3 and R1, Moonlight, Kimi-K2 and GLM-4.7-Flash: latent attention, experts scored by a sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.hf.families.family import (
    DENSE,
    EXPERTS,
    MODEL,
    ROUTING_BIAS,
    Family,
    Refusals,
    after_the_first,
    in_layers,
    mixture,
    rotary_base,
    rotary_scaling,
    row,
    shared_experts,
)
from megarl.hf.families.slices import Config, copy

LATENT_ATTENTION = in_layers(
    row(copy, "input_layernorm.weight", "input_layernorm.weight"),
    row(copy, "self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    row(copy, "self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    row(copy, "self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    row(copy, "self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    row(copy, "self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    row(copy, "self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    row(copy, "self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    row(copy, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)


_UNSCALED = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def sigmoid_routing(config: Config) -> dict[str, Any]:
    """Return Megatron's fields for experts that are scored by a sigmoid and chosen with a bias."""
    grouped = (config.get("n_group") or 1) > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_router_num_groups": config["n_group"] if grouped else None,
        "moe_router_group_topk": config["topk_group"] if grouped else None,
    }


def _settings(config: Config) -> dict[str, Any]:
    scaling = rotary_scaling(config)
    rotary = yarn_fields(scaling) if scaling["rope_type"] == "yarn" else _UNSCALED
    return {
        **mixture(config),
        **sigmoid_routing(config),
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config.get("n_shared_experts", 1),
        "moe_shared_expert_overlap": True,
        "attention_backend": "fused",
        "disable_bf16_reduced_precision_matmul": True,
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rotary_base": rotary_base(config),
        **rotary,
    }


def yarn_fields(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's fields for YaRN with latent attention.

    Without `mscale` and `mscale_all_dim`, transformers scales cosines and sines by the full factor's mscale and does not
    scale logits: 1 and 0 in Megatron's fields.
    """
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": scaling.get("mscale") or 1.0,
        "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
    }


def _unsupported(config: Config) -> Refusals:
    """Refuse what Megatron's latent attention and routing cannot do.

    `rms_norm_eps` other than 1e-6 is supported: transformers ignores it in the norms of the latents, but engines and
    Megatron apply it there.
    """
    scaling = rotary_scaling(config)
    chosen, groups = config["num_experts_per_tok"], config.get("topk_group") or 1
    yield chosen == 1, "num_experts_per_tok: 1"
    yield not config.get("norm_topk_prob", True), "norm_topk_prob: false"
    yield not config.get("n_shared_experts", 1), "no shared experts (n_shared_experts)"
    yield (
        (config.get("n_group") or 1) > 1 and chosen // groups != 2,
        "groups of experts chosen by the best two scores in each, where Megatron takes the best "
        f"num_experts_per_tok / topk_group = {chosen} / {groups} = {chosen / groups:g}",
    )
    yield not config.get("rope_interleave", True), "rope_interleave: false"
    yield scaling.get("attention_factor") is not None, "a rotary attention_factor"
    yield not scaling.get("truncate", True), "rotary scaling with truncate: false"
    yield bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")), "only one of mscale and mscale_all_dim"


DEEPSEEK_V3 = Family(
    (*MODEL, *LATENT_ATTENTION, *DENSE, *EXPERTS, *shared_experts("shared_experts"), *ROUTING_BIAS),
    _settings,
    sparse=after_the_first,
    unsupported=_unsupported,
    rotary=("default", "yarn"),
    ties=False,
    latent=True,
    adapters=True,
)


def _sparse_by_type(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return kinds[layer] == "sparse" if kinds else layer >= config.get("first_k_dense_replace", 1)


KIMI_K2 = replace(DEEPSEEK_V3, reads_as="deepseek_v3", adapters=False)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, sparse=_sparse_by_type, adapters=False)
