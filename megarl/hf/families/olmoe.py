"""OLMoE."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import ATTENTION, EXPERTS, MODEL
from megarl.hf.families.settings import mixture
from megarl.hf.families.slices import Config

_EPSILON = 1e-5


def _always(config: Config, layer: int) -> bool:
    return True


def _olmoe(config: Config) -> dict[str, Any]:
    # Weights from the softmax over all experts. Without `qk_layernorm`, for which Megatron would sum the norms' gradients over
    # tensor-parallel ranks: see `wide_norms`.
    return {**mixture(config), "moe_router_pre_softmax": True}


def _unsupported(config: Config) -> Refusals:
    epsilon = config.get("rms_norm_eps", _EPSILON)
    yield config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"
    yield config.get("clip_qkv") is not None, f"clip_qkv: {config.get('clip_qkv')}"
    yield bool(config.get("norm_topk_prob")), "norm_topk_prob: true, which vLLM does not apply"
    yield epsilon != _EPSILON, f"rms_norm_eps: {epsilon}, which vLLM does not apply to the norms of queries and keys"


OLMOE = Family(
    (*MODEL, *ATTENTION, *EXPERTS),
    _olmoe,
    sparse=_always,
    unsupported=_unsupported,
    rotary=("default",),
    wide_norms=True,
)
