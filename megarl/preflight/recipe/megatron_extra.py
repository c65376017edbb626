"""What `megatron.extra` may not hold, whatever the model and the device: fields that other settings, or the model, decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.errors import RecipeError

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe

# Fields of Megatron's TransformerConfig that other settings decide, and which; None: megarl itself.
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
# Fields that mbridge reads off the model.
_OWNED_BY_MODEL = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "num_moe_experts", "moe_router_topk", "moe_layer_freq",
    "layernorm_epsilon", "normalization", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers",
    "params_dtype", "bf16", "fp16",
)  # fmt: skip
# Each drops tokens by what else is in their micro batch.
_DROPS_TOKENS = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy")


def check_extra_is_left_over(recipe: Recipe) -> None:
    """Raise RecipeError for a field in `megatron.extra` that something else decides. What megarl sets keeps the loss
    independent of micro batches and layout; Megatron's router losses are not."""
    for section, megatron in (("megatron", recipe.megatron), ("critic.megatron", recipe.critic.megatron)):
        for name, value in megatron.extra.items():
            if refusal := refusal_of_extra(name, section):
                raise RecipeError(f"{section}.extra.{name}", *refusal, value=value)
        if megatron.extra.get("moe_token_dispatcher_type") == "allgather":
            what = "it wants micro batches of equal length, and here each is as long as its sequences are"
            key = f"{section}.extra.moe_token_dispatcher_type"
            raise RecipeError(key, what, "use alltoall, which is also where it is unset", value="allgather")


def refusal_of_extra(name: str, section: str) -> tuple[str, str] | None:
    """(what is wrong, what to do), or None."""
    if instead := _OWNED_BY_MEGATRON_KEYS.get(name):
        return f"{section}.{instead} decides it", f"set {section}.{instead}"
    if name in _OWNED_BY_MEGATRON_KEYS:
        return "losses are right with megarl's own setting alone", "leave it out"
    if name in _OWNED_BY_MODEL:
        what = (
            "the model (its config.json, model.dtype) decides it: the trainer would compute another one than the engine"
        )
        return what, "leave it out"
    if name in _DROPS_TOKENS:
        what = "tokens would be dropped by what else is in their micro batch, so the loss would depend on the split"
        return what, f"leave it out; {section}.moe_aux_loss_coef balances experts"
    return None
