"""Tiny Hugging Face models for the Megatron tests, random but fixed."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

LENGTHS = [7, 13, 41, 5, 3, 15, 9, 3]
"""Of the sequences of the global batch. With [7, 13, 41] in one micro batch, attention needs two rectangles;
in pairs, they need no padding under TP 2."""

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}


def _qwen2_tied() -> transformers.PreTrainedModel:
    # 255 entries: no tensor-parallel size divides them, so the vocabulary is padded.
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{**COMMON, "vocab_size": 255, "tie_word_embeddings": True})
    )


def _qwen3() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=16))


def _qwen3_moe() -> transformers.PreTrainedModel:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=16, num_experts=4, mlp_only_layers=[])
    )


def _deepseek_v3() -> transformers.PreTrainedModel:
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **{**COMMON, "num_key_value_heads": 4},
            **EXPERTS,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            routed_scaling_factor=2.5,
        )
    )


MODELS = {"qwen2_tied": _qwen2_tied, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3}


def write_model(name: str, directory: Path) -> Path:
    """Save the model `name` under `directory`/`name`; its weights are the same every time."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.05)
        for key, buffer in model.named_buffers():
            if "e_score" in key:
                buffer.copy_(torch.randn_like(buffer) * 0.01)
    path = directory / name
    model.save_pretrained(path)
    return path
