"""Tiny Gemma 3 models for the Megatron tests."""

from __future__ import annotations

from typing import Any

import transformers

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def fields(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return fields of config.json: two layers of each kind, a window shorter than the tests' sequences, scaled positions.

    As in the model of 27 billion parameters, `query_pre_attn_scalar` differs from the head size. `global_batch` lacks the padding
    token, because transformers gives its embedding no gradient.
    """
    rotary = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return {
        **sizes,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": rotary,
        "pad_token_id": 255,
        "tie_word_embeddings": True,
    }


def text(sizes: dict[str, Any]) -> transformers.PreTrainedModel:
    """Build a text model, as the published one with a billion parameters is."""
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**fields(sizes)))


def with_tower(sizes: dict[str, Any]) -> transformers.PreTrainedModel:
    """Build a model with a vision tower, as the published ones with 4 to 27 billion parameters are."""
    config = transformers.Gemma3Config(
        text_config=fields(sizes),
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=251,
        boi_token_index=252,
        eoi_token_index=253,
    )
    return transformers.Gemma3ForConditionalGeneration(config)
