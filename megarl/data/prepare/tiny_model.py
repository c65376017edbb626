"""Random models of real architectures, small enough for a CPU, as Hugging Face directories.

Weights are drawn by name from (seed, name) with NumPy, so a directory is the same to the byte
wherever and with whatever version of transformers it is made, and neither transformers nor torch
has to be imported.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from megarl.data.prepare.tiny_tokenizer import EOS_ID, PAD_ID, VOCAB_LIMIT, make_tiny_tokenizer

Kind = Literal["qwen3_moe", "qwen3", "qwen2", "deepseek_v3"]
Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

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

# Head sizes are those that vLLM has CPU kernels for.
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
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "attention_bias": False,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,  # vLLM's MLA kernel on CPU has this size only, and 64 for the rotary part
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
    },
}


def make_tiny_model(kind: Kind, out: Path | str, seed: int, norm_spread: float = 0.1, **sizes: Any) -> Path:
    """Write a random float32 model with its tokenizer; returns the directory.

    Args:
        kind: the architecture, by its `model_type`.
        seed: of the weights.
        norm_spread: standard deviation of norm weights about 1, and of biases about 0. 0 gives the
            usual start of training; anything else lets a test see two norms exchanged.
        sizes: fields of config.json in place of the tiny ones, e.g. ``num_hidden_layers=4``.

    Raises:
        ValueError: the kind or a size is unknown, or the vocabulary is smaller than the tokenizer's.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no tiny {kind!r} model, only {', '.join(get_args(Kind))}")
    config = {"model_type": kind, **COMMON, **KINDS[kind]}
    unknown = sorted(sizes.keys() - config.keys())
    if unknown:
        raise ValueError(f"{kind} has no size {', '.join(unknown)}; there are {', '.join(config)}")
    config |= sizes
    out = Path(out)
    ids = make_tiny_tokenizer(out)
    if config["vocab_size"] < ids:
        raise ValueError(f"vocab_size {config['vocab_size']} is below the tiny tokenizer's {ids} ids")
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    _write_weights(out / "model.safetensors", config, seed, norm_spread)
    return out


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(path: Path, config: Config, seed: int, norm_spread: float) -> None:
    from safetensors.numpy import save_file

    tensors = {}
    for name, shape in _shapes(config):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:
            tensors[name] = noise * np.float32(config["initializer_range"])
        else:
            tensors[name] = noise * np.float32(norm_spread) + np.float32("norm" in name)
    save_file(tensors, path, metadata={"format": "pt"})


def _shapes(config: Config) -> Shapes:
    """Every tensor of the checkpoint, under the architecture's own names, as (name, [out, in])."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    attention: dict[str, Callable[[Config], Shapes]] = {"qwen2": _qwen2_attention, "deepseek_v3": _latent_attention}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, shape in attention.get(config["model_type"], _qwen3_attention)(config):
            yield f"{prefix}self_attn.{name}", shape
        for name, shape in _feed_forward(config, layer):
            yield f"{prefix}mlp.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _projections(config: Config, head: int) -> Shapes:
    hidden, queries, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    yield "q_proj.weight", (queries * head, hidden)
    yield "k_proj.weight", (keys * head, hidden)
    yield "v_proj.weight", (keys * head, hidden)
    yield "o_proj.weight", (hidden, queries * head)


def _qwen2_attention(config: Config) -> Shapes:
    head = config["hidden_size"] // config["num_attention_heads"]
    yield from _projections(config, head)
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        yield f"{name}_proj.bias", (config[heads] * head,)


def _qwen3_attention(config: Config) -> Shapes:
    yield from _projections(config, config["head_dim"])
    yield "q_norm.weight", (config["head_dim"],)
    yield "k_norm.weight", (config["head_dim"],)


def _latent_attention(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield "q_a_proj.weight", (q_rank, hidden)
    yield "q_a_layernorm.weight", (q_rank,)
    yield "q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield "kv_a_layernorm.weight", (kv_rank,)
    yield "kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield "o_proj.weight", (hidden, heads * value)


def _feed_forward(config: Config, layer: int) -> Shapes:
    hidden, kind = config["hidden_size"], config["model_type"]
    if kind == "qwen3_moe":
        dense = layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"] != 0
        experts = config["num_experts"]
    else:
        dense = kind != "deepseek_v3" or layer < config["first_k_dense_replace"]
        experts = config.get("n_routed_experts", 0)
    if dense:
        yield from _gated("", hidden, config["intermediate_size"])
        return
    yield "gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from _gated(f"experts.{expert}.", hidden, config["moe_intermediate_size"])
    if kind == "deepseek_v3":
        yield "gate.e_score_correction_bias", (experts,)
        yield from _gated("shared_experts.", hidden, config["moe_intermediate_size"] * config["n_shared_experts"])


def _gated(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}gate_proj.weight", (width, hidden)
    yield f"{prefix}up_proj.weight", (width, hidden)
    yield f"{prefix}down_proj.weight", (hidden, width)
