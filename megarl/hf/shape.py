"""Parameter counts of a language model's parts, from a Hugging Face config.json, to compute FLOPs and bytes. Pure.

Only matrices count: norms, biases and routing biases are some ten-thousandths of a model. A vision tower with its
projector, multi-token-prediction layers (not trained) and adapters are left out too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.hf.config import number_of_experts, text_fields

Config = dict[str, Any]


@dataclass(frozen=True)
class Attention:
    """Attention of one layer."""

    weights: int
    per_pair: int  # multiply-adds per (query, key) pair in training
    per_cached_pair: int  # the same in decoding: latent attention works on the cached latent
    cached: int  # elements per token in the KV cache
    keys_and_values: int  # elements per token of keys and values in training
    pieces: int  # tensor-parallel ranks that can split the cache; further ranks hold copies


@dataclass(frozen=True)
class ModelShape:
    """Parameter counts of a model's parts, in elements unless noted."""

    hidden: int  # size of hidden states
    output: int  # the output layer; the embedding is as large
    tied: bool  # the output layer shares the embedding's weights
    attention: Attention
    dense: int  # the MLP of a dense layer
    shared: int  # of a sparse layer: router, shared experts and their gate
    expert: int  # one routed expert
    experts: int  # number of routed experts of a sparse layer
    chosen: int  # number of routed experts per token (top-k)
    sparse: tuple[bool, ...]  # per layer: True for a mixture of experts

    @property
    def layers(self) -> int:
        return len(self.sparse)

    def active_in(self, layer: int) -> int:
        """Return the parameters of a layer that are active for a token."""
        mlp = self.shared + self.chosen * self.expert if self.sparse[layer] else self.dense
        return self.attention.weights + mlp

    def total_in(self, layer: int) -> int:
        """Return all parameters of a layer."""
        mlp = self.shared + self.experts * self.expert if self.sparse[layer] else self.dense
        return self.attention.weights + mlp

    @property
    def active(self) -> int:
        """Parameters that are active for a token, including the output layer and without the embedding."""
        return sum(self.active_in(layer) for layer in range(self.layers)) + self.output

    @property
    def total(self) -> int:
        return sum(self.total_in(layer) for layer in range(self.layers)) + self.output * (1 if self.tied else 2)

    @property
    def routed(self) -> int:
        """Parameters of all routed experts."""
        return sum(self.sparse) * self.experts * self.expert


def model_shape(hf_config: Config) -> ModelShape:
    """Count a model's parameters. Raises ValueError for a `model_type` that is not in `COUNTED`."""
    kind = hf_config.get("model_type", "")
    if kind not in COUNTED:
        supported = ", ".join(sorted(COUNTED))
        raise ValueError(f"model_type {kind!r} is not supported by the parameter counts; supported: {supported}.")
    config = text_fields(hf_config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    sparse = tuple(COUNTED[kind](config, layer) for layer in range(layers))
    routed = 3 * hidden * (config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
    return ModelShape(
        hidden=hidden,
        output=hidden * config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        attention=_latent_attention(config) if config.get("kv_lora_rank") else _attention(config),
        dense=3 * hidden * (config.get("intermediate_size") or 0),
        shared=hidden * _shared_width(config) if any(sparse) else 0,
        expert=routed if any(sparse) else 0,
        experts=number_of_experts(config) if any(sparse) else 0,
        chosen=config["num_experts_per_tok"] if any(sparse) else 0,
        sparse=sparse,
    )


def _attention(config: Config) -> Attention:
    """Count multi-head or grouped-query attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    projected = (heads + 2 * groups) * size + heads * size  # query, key, value; and out
    return Attention(
        hidden * projected, heads * 2 * size, heads * 2 * size, 2 * groups * size, 2 * groups * size, groups
    )


def _latent_attention(config: Config) -> Attention:
    """Count multi-head latent attention (DeepSeek).

    Training computes keys and values from the latent. In decoding, heads attend to the latent, and their up-projections
    are applied to query and output instead (arXiv 2405.04434, 2.1.2).
    """
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query_rank, query = config.get("q_lora_rank"), heads * (plain + rotary)
    weights = hidden * query_rank + query_rank * query if query_rank else hidden * query
    weights += hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
    trained = heads * (plain + rotary + value)
    return Attention(weights, trained, heads * (2 * rank + rotary), rank + rotary, trained, 1)


def _shared_width(config: Config) -> int:
    """Return the total output width of a sparse layer's always-active matrices: router, shared experts and their gate."""
    routed = config.get("moe_intermediate_size") or config["intermediate_size"]
    width = number_of_experts(config) + 3 * routed * (config.get("n_shared_experts") or 0)
    if shared := config.get("shared_expert_intermediate_size"):
        width += 3 * shared + 1  # and its gate
    return width


def _every_few(config: Config, layer: int) -> bool:
    dense = layer in (config.get("mlp_only_layers") or [])
    return not dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _after_the_first(config: Config, layer: int) -> bool:
    return layer >= config.get("first_k_dense_replace", 0)


COUNTED: dict[str, Callable[[Config, int], bool]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen2_5_vl"), lambda config, layer: False),
    "mixtral": lambda config, layer: True,
    "qwen2_moe": _every_few,
    "qwen3_moe": _every_few,
    "deepseek_v3": _after_the_first,
    "glm4_moe": _after_the_first,
}
"""Supported model types; each function tells whether a layer (from 0) of a configuration is a mixture of experts."""
