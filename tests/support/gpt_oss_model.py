"""A tiny gpt-oss for the Megatron tests."""

from __future__ import annotations

from typing import Any

import transformers


def build(sizes: dict[str, Any]) -> transformers.PreTrainedModel:
    """Build a model with a window that is shorter than the tests' sequences, and heads wider than the hidden size."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    }
    config = transformers.GptOssConfig(
        **{**sizes, "intermediate_size": 32},
        head_dim=32,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=yarn,
    )
    return transformers.GptOssForCausalLM(config)


def exceed_the_limit(model: transformers.PreTrainedModel) -> None:
    """Enlarge biases, so that the activation clamps some of its inputs, at 7."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate_up_proj_bias"):
            parameter.mul_(100)
