"""A hand-written dump of a small model (megarl/megatron/megatron_bridge/dump.py), and the folder in MEGARL_MEGATRON_BRIDGE."""

from __future__ import annotations

import os
from typing import Any

import pytest

FOLDER = os.environ.get("MEGARL_MEGATRON_BRIDGE", "")
WITH_PACKAGE = pytest.mark.skipif(
    not FOLDER, reason="MEGARL_MEGATRON_BRIDGE names no folder with megatron-bridge (pip install --no-deps --target)"
)
CONFIG: dict[str, Any] = {
    "model_type": "newest",
    "architectures": ["NewestForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "logit_scale": 2.0,
}
_MODULE = "megatron.bridge.models.conversion.param_mapping"


_FIELDS = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 256,
    "layernorm_epsilon": 1e-6,
    "share_embeddings_and_output_weights": False,
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "activation_func": "torch.nn.functional.silu",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "qk_layernorm": True,
    "window_size": None,
    "multi_latent_attention": False,
    "transformer_layer_spec": "megatron.bridge.models.gpt_provider.default_layer_spec",
}
"""The fields of the provider of `CONFIG`."""


def mapping(kind: str, parameter: str, tensors: str | dict[str, str], **more: Any) -> dict[str, Any]:
    return {"type": kind, "module": _MODULE, "parameter": parameter, "tensors": tensors, "options": {}, **more}


def dense_dump() -> dict[str, Any]:
    """The dump of a dense model with norms of queries and keys; tests change it."""
    at, of = "decoder.layers.*.", "model.layers.*."
    copies = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        f"{at}self_attention.linear_qkv.layer_norm_weight": f"{of}input_layernorm.weight",
        f"{at}self_attention.q_layernorm.weight": f"{of}self_attn.q_norm.weight",
        f"{at}self_attention.k_layernorm.weight": f"{of}self_attn.k_norm.weight",
        f"{at}self_attention.linear_proj.weight": f"{of}self_attn.o_proj.weight",
        f"{at}mlp.linear_fc1.layer_norm_weight": f"{of}post_attention_layernorm.weight",
        f"{at}mlp.linear_fc2.weight": f"{of}mlp.down_proj.weight",
    }
    return {
        "version": "9.9",
        "bridge": "NewestBridge",
        "hooks": [],
        "absent": [],
        "read": sorted(CONFIG.keys() - {"logit_scale"}),
        "mappings": [
            *(mapping("AutoMapping", parameter, tensor) for parameter, tensor in copies.items()),
            mapping(
                "QKVMapping",
                f"{at}self_attention.linear_qkv.weight",
                {part: f"{of}self_attn.{part}_proj.weight" for part in "qkv"},
            ),
            mapping(
                "GatedMLPMapping",
                f"{at}mlp.linear_fc1.weight",
                {part: f"{of}mlp.{part}_proj.weight" for part in ("gate", "up")},
            ),
        ],
        "provider": {
            "type": "GPTModelProvider",
            "provide": "megatron.bridge.models.gpt_provider.GPTModelProvider",
            "fields": dict(_FIELDS),
            "defaults": {"qk_layernorm": False, "window_size": None},
        },
    }
