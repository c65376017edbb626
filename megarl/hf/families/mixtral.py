"""Mixtral, and MiniMax-M2, which stores its experts under the same names."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import ATTENTION, MODEL, in_layers, row
from megarl.hf.families.settings import mixture, sigmoid_routing
from megarl.hf.families.slices import Config, copy, gate_up

_EXPERTS = in_layers(
    row(copy, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    row(copy, "mlp.router.weight", "block_sparse_moe.gate.weight"),
    row(copy, "mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias"),
    row(
        gate_up,
        "mlp.experts.linear_fc1.weight{expert}",
        "block_sparse_moe.experts.{expert}.w1.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
    ),
    row(copy, "mlp.experts.linear_fc2.weight{expert}", "block_sparse_moe.experts.{expert}.w2.weight"),
)


def _always(config: Config, layer: int) -> bool:
    return True


def _mixtral(config: Config) -> dict[str, Any]:
    return mixture(config)


def _minimax_m2(config: Config) -> dict[str, Any]:
    # Without `qk_layernorm`, for which Megatron would sum the norms' gradients over tensor-parallel ranks: see `wide_norms`.
    return {**mixture(config), **sigmoid_routing(config)}


def _unsupported(config: Config) -> Refusals:
    yield config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"
    yield bool(config.get("sliding_window")), f"sliding_window: {config.get('sliding_window')}"
    yield bool(config.get("router_jitter_noise")), "router_jitter_noise, which engines do not apply"


def _unsupported_minimax(config: Config) -> Refusals:
    yield from _unsupported(config)
    yield not config.get("use_qk_norm", True), "use_qk_norm: false"
    yield config.get("qk_norm_type", "per_layer") != "per_layer", f"qk_norm_type: {config.get('qk_norm_type')}"
    yield not config.get("use_routing_bias", True), "use_routing_bias: false"
    yield config.get("scoring_func", "sigmoid") != "sigmoid", f"scoring_func: {config.get('scoring_func')}"
    yield bool(config.get("shared_intermediate_size")), "shared experts (shared_intermediate_size)"
    yield 0 in (config.get("attn_type_list") or ()), "linear attention (attn_type_list)"


MIXTRAL = Family((*MODEL, *ATTENTION, *_EXPERTS), _mixtral, sparse=_always, unsupported=_unsupported)
MINIMAX_M2 = Family(
    (*MODEL, *ATTENTION, *_EXPERTS),
    _minimax_m2,
    sparse=_always,
    unsupported=_unsupported_minimax,
    rotary=("default",),
    wide_norms=True,
)
