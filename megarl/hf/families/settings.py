"""Fields of Megatron's TransformerConfig that several families share, from config.json."""

from __future__ import annotations

from typing import Any

from megarl.hf.config import experts_per_token, number_of_experts, shared_experts
from megarl.hf.families.slices import Config

_UNSCALED = {
    "rope_type": "rope",
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # latent attention


def rotary_scaling(config: Config) -> dict[str, Any]:
    """Return the rotary scaling in config.json: `rope_parameters` since transformers 5, `rope_scaling` before.

    Of layers with full attention, if layers with sliding windows have other frequencies (Gemma 3).
    """
    scaling: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = scaling.get("full_attention", scaling)
    return {**scaling, "rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}


def rotary_of_kind(config: Config, kind: str) -> dict[str, Any]:
    """Return the rotary scaling of layers of a kind of attention, with its base, of a model that has it by kind (Gemma 3).

    Transformers 5 writes it by kind; configurations from before have `rope_local_base_freq`, without scaling.
    """
    if kind != "sliding_attention":
        return {"rope_theta": rotary_base(config), **rotary_scaling(config)}
    local = (config.get("rope_parameters") or {}).get(kind)
    local = local or {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
    return {**local, "rope_type": local.get("rope_type") or "default"}


def rotary_base(config: Config) -> float:
    """Return the base of the rotary frequencies."""
    return rotary_scaling(config).get("rope_theta") or config.get("rope_theta") or 10000.0


def rotated_part(config: Config) -> float:
    """Return the part of each head that is rotated, between 0 and 1."""
    return rotary_scaling(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0


def mixture(config: Config) -> dict[str, Any]:
    """Return Megatron's fields that all mixtures of experts share."""
    return {
        "num_moe_experts": number_of_experts(config),
        "moe_router_topk": experts_per_token(config),
        "moe_ffn_hidden_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "moe_grouped_gemm": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "persist_layer_norm": True,
        # megarl computes its own balancing losses: megatron/moe/router_losses.py.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
    }


def shared_width(config: Config) -> int:
    """Return the width of the shared experts together: `moe_shared_expert_intermediate_size`; 0 without them."""
    return int(config.get("moe_intermediate_size") or 0) * shared_experts(config)


def latent_attention(config: Config) -> dict[str, Any]:
    """Return Megatron's fields for multi-head latent attention: its sizes, rotary embedding and kernels."""
    scaling = rotary_scaling(config)
    return {
        "attention_backend": "fused",
        "disable_bf16_reduced_precision_matmul": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rotary_base": rotary_base(config),
        **(yarn_fields(scaling) if scaling["rope_type"] == "yarn" else _UNSCALED),
    }


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
