"""Random models of real architectures, small enough for a CPU, as Hugging Face directories.

The bytes of a directory do not depend on the machine or on the version of transformers. Neither transformers nor torch
is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

from megarl.commands.data.tiny_tokenizer import EOS_ID, PAD_ID, VOCAB_LIMIT, make_tiny_tokenizer
from megarl.commands.data.tiny_weights import Config, write_weights
from megarl.hf.families.tables.family_table import without_table

Kind = Literal[
    "qwen3_moe", "qwen3", "qwen2", "deepseek_v3", "ernie4_5_moe", "gemma3_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "kimi_k2", "llama", "minimax_m2",
    "mistral", "mixtral", "olmoe", "qwen2_moe", "qwen3_next",
]  # fmt: skip

COMMON: Config = {
    "vocab_size": VOCAB_LIMIT,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "use_cache": True,
    "torch_dtype": "float32",
}

_LATENT: Config = {
    "num_key_value_heads": 4,
    "attention_bias": False,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # vLLM's MLA kernel on CPU only supports this size, and 64 for the rotary part
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "rope_interleave": True,
    "rope_scaling": None,
}

# vLLM has CPU kernels for these head sizes.
KINDS: dict[str, Config] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 128, "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "attention_bias": False},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "attention_bias": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
    "deepseek_v3": {**_LATENT, "architectures": ["DeepseekV3ForCausalLM"]},
    "kimi_k2": {**_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8},
    "glm4_moe_lite": {**_LATENT, "architectures": ["Glm4MoeLiteForCausalLM"], "routed_scaling_factor": 1.8},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "hidden_size": 128,
        "use_bias": False,
        "tie_word_embeddings": True,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "rms_norm_eps": 1e-5,
        "hidden_size": 128,
        "intermediate_size": 64,
        "head_dim": 32,
        "attention_bias": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "output_router_logits": False,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": 32, "attention_bias": False, "mlp_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 32, "sliding_window": None},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 32,
        "rotary_dim": 16,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "rms_norm_eps": 1e-5,
        "hidden_size": 128,
        "intermediate_size": 64,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "use_sliding_window": False,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 32,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def make_tiny_model(kind: Kind, out: Path | str, seed: int, norm_spread: float = 0.1, **sizes: Any) -> Path:
    """Write a random float32 model with its tokenizer. Return the directory.

    Args:
        kind: the architecture, by its `model_type`.
        seed: seed of the weights.
        norm_spread: standard deviation of norm weights (mean 1) and of biases (mean 0). 0 is the usual
            initialization; other values let a test detect norms that were swapped.
        sizes: fields of config.json that replace the tiny ones, e.g. ``num_hidden_layers=4``.

    Raises:
        ValueError: the kind or a size is unknown, or the vocabulary is smaller than the tokenizer's.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no tiny {kind!r} model, only {', '.join(get_args(Kind))}")
    config = {"model_type": kind, **COMMON, **KINDS[kind]}
    unknown = sorted(sizes.keys() - config.keys())
    if unknown:
        raise ValueError(f"{kind} has no size {', '.join(unknown)}; the sizes are {', '.join(config)}")
    config |= sizes
    out = Path(out)
    ids = make_tiny_tokenizer(out)
    if config["vocab_size"] < ids:
        raise ValueError(f"vocab_size {config['vocab_size']} is below the tiny tokenizer's {ids} ids")
    write_model(out, config, seed, norm_spread)
    return out


def write_model(out: Path, config: Config, seed: int, norm_spread: float) -> None:
    """Write the random model that `config` describes, without a tokenizer. A family's table in `config` stays out of config.json.

    Raises ValueError for an unsupported `model_type`.
    """
    write_weights(out / "model.safetensors", config, seed, norm_spread)
    _write_json(out / "config.json", without_table(config))
    _write_json(out / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
