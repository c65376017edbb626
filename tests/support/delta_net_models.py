"""Tiny models with gated delta nets for the Megatron tests: Qwen3-Next and Qwen3.5. `sizes`: fields of config.json."""

from __future__ import annotations

from typing import Any

import transformers

Sizes = dict[str, Any]
DELTA: Sizes = {
    "head_dim": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
TOWER: Sizes = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def qwen3_next(sizes: Sizes, experts: Sizes) -> transformers.PreTrainedModel:
    """Qwen3-Next: two layers of gated delta nets, with two value heads for each key head, and two of gated attention."""
    config = transformers.Qwen3NextConfig(
        **sizes,
        **experts,
        **DELTA,
        num_experts=4,
        shared_expert_intermediate_size=64,
    )
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_5_text(sizes: Sizes) -> transformers.PreTrainedModel:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes, **DELTA))


def qwen3_5(sizes: Sizes) -> transformers.PreTrainedModel:
    """Qwen3.5 as it is published: with a vision tower, and tied embeddings as its small models have."""
    text = {**sizes, **DELTA, "tie_word_embeddings": True}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=TOWER, tie_word_embeddings=True)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe(sizes: Sizes, experts: Sizes) -> transformers.PreTrainedModel:
    """Qwen3.5 with experts. `write_model` stacks them, as in the published checkpoints."""
    text = _with_experts(sizes, experts)
    return transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(text_config=text, vision_config=TOWER)
    )


def qwen3_5_moe_text(sizes: Sizes, experts: Sizes) -> transformers.PreTrainedModel:
    """The language model alone, as tiny copies have it. `write_model` stacks the experts."""
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**_with_experts(sizes, experts)))


def _with_experts(sizes: Sizes, experts: Sizes) -> Sizes:
    text = {**sizes, **DELTA, **experts, "num_experts": 4, "shared_expert_intermediate_size": 64}
    del text["intermediate_size"], text["norm_topk_prob"]
    return text
