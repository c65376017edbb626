"""Names and shapes of the checkpoint tensors of real architectures, and random values for them.

NumPy draws the values of a tensor from the seed and its name, so they are the same on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.atomic_files import give_default_mode
from megarl.hf.config import number_of_experts

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_weights(path: Path, config: Config, seed: int, norm_spread: float) -> None:
    """Write random tensors for `config` to a safetensors file.

    The standard deviation is `initializer_range` for matrices, and `norm_spread` for norms (mean 1) and biases (mean 0).
    Raises ValueError for an unsupported `model_type`.
    """
    from safetensors.numpy import save_file

    tensors = {}
    for name, shape in shapes(config):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:
            tensors[name] = noise * np.float32(config["initializer_range"])
        else:
            tensors[name] = noise * np.float32(norm_spread) + np.float32("norm" in name or name.endswith("ln_q.weight"))
    save_file(tensors, path, metadata={"format": "pt"})
    give_default_mode(path)


def shapes(config: Config) -> Shapes:
    """Iterate over the tensors of the checkpoint as (published name, shape [out, in])."""
    kind = config["model_type"]
    if kind not in KINDS:
        raise ValueError(f"the model type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        yield from _layer(config, layer)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    for layer in range(layers, layers + (config.get("num_nextn_predict_layers") or 0)):
        yield from _layer(config, layer)
        yield from _token_prediction(config, f"model.layers.{layer}.")
    if "vision_config" in config:
        yield from _vision_tower(config["vision_config"])


def _layer(config: Config, layer: int) -> Shapes:
    prefix, hidden = f"model.layers.{layer}.", config["hidden_size"]
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    for name, shape in KINDS[config["model_type"]](config):
        yield f"{prefix}self_attn.{name}", shape
    for name, shape in _feed_forward(config, layer):
        yield f"{prefix}mlp.{name}", shape


def _token_prediction(config: Config, prefix: str) -> Shapes:
    """Iterate over the additional tensors of a multi-token prediction layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}{name}.weight", (hidden,)
    yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden)
    for name in ("embed_tokens", "shared_head.head"):
        yield f"{prefix}{name}.weight", (vocab, hidden)


def _attention(config: Config, *, bias: bool = False, norms: bool = False) -> Shapes:
    """Iterate over the tensors of grouped-query attention. norms: queries and keys of each head are normalized."""
    hidden, queries, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // queries
    for name, heads in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{name}_proj.weight", (heads * head, hidden)
    yield "o_proj.weight", (hidden, queries * head)
    for name, heads in (("q", queries), ("k", keys), ("v", keys)) if bias else ():
        yield f"{name}_proj.bias", (heads * head,)
    for name in ("q", "k") if norms else ():
        yield f"{name}_norm.weight", (head,)


def _latent_attention(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if q_rank:
        yield "q_a_proj.weight", (q_rank, hidden)
        yield "q_a_layernorm.weight", (q_rank,)
        yield "q_b_proj.weight", (heads * (nope + rope), q_rank)
    else:
        yield "q_proj.weight", (heads * (nope + rope), hidden)
    yield "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield "kv_a_layernorm.weight", (kv_rank,)
    yield "kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield "o_proj.weight", (hidden, heads * value)


KINDS: dict[str, Callable[[Config], Shapes]] = {
    "llama": _attention,
    "qwen2": partial(_attention, bias=True),
    "qwen2_5_vl": partial(_attention, bias=True),
    "qwen3": partial(_attention, norms=True),
    "qwen3_moe": partial(_attention, norms=True),
    "deepseek_v3": _latent_attention,
    "glm4_moe": lambda config: _attention(config, bias=True, norms=bool(config.get("use_qk_norm"))),
}
"""Function that yields the attention tensors, for each supported `model_type`."""


_DENSE_FIRST = ("deepseek_v3", "glm4_moe")


def _feed_forward(config: Config, layer: int) -> Shapes:
    hidden, kind, experts = config["hidden_size"], config["model_type"], number_of_experts(config)
    if kind == "qwen3_moe":
        dense = layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"] != 0
    else:
        dense = kind not in _DENSE_FIRST or layer < config["first_k_dense_replace"]
    if dense:
        yield from _gated("", hidden, config["intermediate_size"])
        return
    yield "gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from _gated(f"experts.{expert}.", hidden, config["moe_intermediate_size"])
    if kind in _DENSE_FIRST:
        yield "gate.e_score_correction_bias", (experts,)
        yield from _gated("shared_experts.", hidden, config["moe_intermediate_size"] * config["n_shared_experts"])


def _gated(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}gate_proj.weight", (width, hidden)
    yield f"{prefix}up_proj.weight", (width, hidden)
    yield f"{prefix}down_proj.weight", (hidden, width)


def _vision_tower(vision: Config) -> Shapes:
    """Iterate over the tensors of Qwen2.5-VL's vision tower."""
    hidden, width, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patch, merged = vision["patch_size"], hidden * vision["spatial_merge_size"] ** 2
    yield (
        "visual.patch_embed.proj.weight",
        (hidden, vision.get("in_channels", 3), vision["temporal_patch_size"], patch, patch),
    )
    for layer in range(vision["depth"]):
        prefix = f"visual.blocks.{layer}."
        yield from ((f"{prefix}{name}.weight", (hidden,)) for name in ("norm1", "norm2"))
        yield from _biased(f"{prefix}attn.qkv", hidden, 3 * hidden)
        yield from _biased(f"{prefix}attn.proj", hidden, hidden)
        yield from _biased(f"{prefix}mlp.gate_proj", hidden, width)
        yield from _biased(f"{prefix}mlp.up_proj", hidden, width)
        yield from _biased(f"{prefix}mlp.down_proj", width, hidden)
    yield "visual.merger.ln_q.weight", (hidden,)
    yield from _biased("visual.merger.mlp.0", merged, merged)
    yield from _biased("visual.merger.mlp.2", merged, out)


def _biased(name: str, size_in: int, size_out: int) -> Shapes:
    yield f"{name}.weight", (size_out, size_in)
    yield f"{name}.bias", (size_out,)
