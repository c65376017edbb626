"""Checks of `megatron.extra`: fields that another setting or the model determines, for every model and device."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.schema import Recipe

# Fields of Megatron's TransformerConfig, with the setting that determines each; None if megarl sets it to a constant.
_OWNED_BY_MEGATRON_KEYS = {
    "tensor_model_parallel_size": "tensor_parallel",
    "sequence_parallel": "sequence_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "num_layers_in_first_pipeline_stage": "first_stage_layers",
    "num_layers_in_last_pipeline_stage": "last_stage_layers",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "moe_aux_loss_coeff": "moe_aux_loss_coef",
    "moe_z_loss_coeff": "moe_z_loss_coef",
    "moe_router_load_balancing_type": "moe_aux_loss_coef",
    "calculate_per_token_loss": None,
    "variable_seq_lengths": None,
}
# Fields that follow from the model.
_OWNED_BY_MODEL = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "num_moe_experts", "moe_router_topk", "moe_layer_freq",
    "layernorm_epsilon", "normalization", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers",
    "params_dtype", "bf16", "fp16", "softmax_scale", "attention_output_gate", "layernorm_zero_centered_gamma",
    "moe_shared_expert_gate", "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_pre_softmax", "mrope_section", "rotary_base",
    "activation_func", "activation_func_clamp_value", "glu_linear_offset", "softmax_type", "window_size",
    "window_attn_skip_freq",
)  # fmt: skip
# With these fields, the other tokens of a micro batch decide which tokens are dropped.
_DROPS_TOKENS = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy")
# Layers in these formats need tokens in multiples of 8 in every product, experts' too; megarl pads for TP and CP alone.
_LOW_PRECISION = ("fp8", "fp4")


def extra_errors(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield an error for each field of `megatron.extra` that another setting or the model determines.

    megarl's router losses do not depend on micro batches and layout; Megatron's depend on both.
    """
    for section, megatron in (("megatron", recipe.megatron), ("critic.megatron", recipe.critic.megatron)):
        for name, value in megatron.extra.items():
            if refusal := refusal_of_extra(name, section):
                yield RecipeError(f"{section}.extra.{name}", *refusal, value=value)
        if megatron.extra.get("moe_token_dispatcher_type") == "allgather":
            problem = "it needs micro batches of equal length, and megarl packs sequences into micro batches of different lengths"
            key = f"{section}.extra.moe_token_dispatcher_type"
            yield RecipeError(key, problem, "use alltoall, which is the default", value="allgather")


def refusal_of_extra(name: str, section: str) -> tuple[str, str] | None:
    """Return (problem, remedy) for a field that a recipe must not set, and None for any other field."""
    if instead := _OWNED_BY_MEGATRON_KEYS.get(name):
        return f"{section}.{instead} determines it", f"set {section}.{instead}"
    if name in _OWNED_BY_MEGATRON_KEYS:
        return "losses are correct only with megarl's setting", "leave it out"
    if name in _OWNED_BY_MODEL:
        problem = "the model (config.json, model.dtype) determines it; with another value trainer and engine would compute different models"
        return problem, "leave it out"
    if name.split("_")[0] in _LOW_PRECISION:
        problem = "megarl trains in 16 bits or float32: FP8 and FP4 need multiples of 8 tokens, to which megarl does not pad micro batches"
        return problem, "leave it out; rollout.quantization=fp8 is for engines"
    if name in _DROPS_TOKENS:
        problem = "it drops tokens depending on the rest of their micro batch, so the loss would depend on the split into micro batches"
        return problem, f"leave it out; {section}.moe_aux_loss_coef balances experts"
    return None
