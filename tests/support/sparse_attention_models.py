"""Tiny models with sparse attention for the Megatron tests. `sizes`: fields of config.json with latent attention."""

from __future__ import annotations

from typing import Any

import transformers

SPARSE_ATTENTION: dict[str, Any] = {
    "q_lora_rank": 32,
    "index_topk": 6,
    "index_n_heads": 17,
    "index_head_dim": 24,
    "num_nextn_predict_layers": 0,
}
"""Queries see fewer keys than most of the tests' sequences have. No tensor-parallel size divides the heads. With few
heads, the scores of many pairs are 0, and topk may select any of them."""


def deepseek_v32(sizes: dict[str, Any], yarn: dict[str, Any]) -> transformers.PreTrainedModel:
    """DeepSeek-V3.2, with YaRN and groups of experts."""
    config = transformers.DeepseekV32Config(
        **{**sizes, **SPARSE_ATTENTION}, n_group=2, topk_group=1, rope_parameters={**yarn}
    )
    return transformers.DeepseekV32ForCausalLM(config)


def glm_moe_dsa(sizes: dict[str, Any]) -> transformers.PreTrainedModel:
    """GLM-5: one group of experts, and neighbors rotated in the indexer."""
    config = transformers.GlmMoeDsaConfig(**{**sizes, **SPARSE_ATTENTION}, n_group=1, topk_group=1, rms_norm_eps=1e-6)
    return transformers.GlmMoeDsaForCausalLM(config)
