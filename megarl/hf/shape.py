"""Parameter counts of a language model's parts, from a Hugging Face config.json, to compute FLOPs and bytes. Pure.

Only matrices count: norms, biases and routing biases are some ten-thousandths of a model. A vision tower with its
projector, multi-token-prediction layers (not trained) and adapters are left out too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from megarl.hf.config import experts_per_token, layer_kinds, number_of_experts, text_fields, with_experts
from megarl.hf.families import family_of
from megarl.hf.families.family import Family
from megarl.hf.families.sizes import head_size, layer_parameters
from megarl.hf.families.stacks import STACKS

Config = dict[str, Any]


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, as the mean over the layers if some have another mixer."""

    weights: int
    per_pair: int  # multiply-adds per (query, key) pair in training
    per_cached_pair: int  # the same in decoding: latent attention works on the cached latent
    cached: int  # elements per token in the KV cache
    keys_and_values: int  # elements per token of keys and values in training
    pieces: int  # tensor-parallel ranks that can split the cache; further ranks hold copies
    least: int  # weights of the smallest layer
    window: int = 0  # keys that a query sees in layers with a sliding window; 0: none has one
    windowed: float = 0.0  # share of the layers with a window
    indexer: int = 0  # matrices of an indexer, which is not trained; part of `weights`
    per_indexed_pair: int = 0  # multiply-adds of the indexer per (query, key) pair, also beyond the window

    def seen(self, tokens: float) -> float:
        """Return the cached tokens that the next query sees after `tokens`, as the mean over layers."""
        return tokens - self.windowed * max(0.0, tokens - self.window)


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


def largest(configs: Iterable[Config]) -> Config:
    """Return the config.json of the model with the most parameters. Raises ValueError as `model_shape` does, if there are several."""
    models = list(configs)
    return models[0] if len(models) == 1 else max(models, key=lambda config: model_shape(config).total)


def model_shape(hf_config: Config) -> ModelShape:
    """Count a model's parameters. Raises ValueError for an unknown `model_type`."""
    family, config = family_of(hf_config), text_fields(hf_config)
    hidden = config["hidden_size"]
    sparse = tuple(family.sparse(config, layer) for layer in range(config["num_hidden_layers"]))
    mixers = layer_kinds(config) if family.delta_nets else [""] * len(sparse)
    kinds = list(zip(sparse, mixers, strict=True))
    counted = {kind: _matrices(family, config, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    of_layers = [counted[kind] for kind in kinds]
    of_sparse = of_layers[sparse.index(True)] if any(sparse) else {}
    of_dense = of_layers[sparse.index(False)] if not all(sparse) else {}
    return ModelShape(
        hidden=hidden,
        output=hidden * config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        attention=_attention(family, config, [layer["attention"] for layer in of_layers]),
        dense=of_dense.get("mlp", 0),
        shared=of_sparse.get("mlp", 0),
        expert=of_sparse.get("expert", 0),
        experts=number_of_experts(config) if any(sparse) else 0,
        chosen=experts_per_token(config) if any(sparse) else 0,
        sparse=sparse,
    )


def _matrices(family: Family, config: Config, layer: int) -> dict[str, int]:
    """Return the elements of a layer's matrices: attention; one expert; and the rest of its MLP, router included."""
    counts = {"attention": 0, "expert": 0, "mlp": 0}
    for row, shape in layer_parameters(family, with_experts_of(config, 1), layer):
        if len(shape) == 2:
            part = (
                "attention"
                if ".self_attention." in row.parameter
                else "expert"
                if ".experts." in row.parameter
                else "mlp"
            )
            counts[part] += prod(shape)
    if counts["expert"]:
        counts["mlp"] += (number_of_experts(config) - 1) * config["hidden_size"]  # the router's other rows
    return counts


def with_experts_of(config: Config, count: int) -> Config:
    """Return a configuration with `count` experts, if it has any."""
    return {**config, **with_experts(config, count)}


def whole_experts(hf_config: Config) -> int:
    """Count the elements of the experts that each engine rank collects whole, of all layers, during a sharded update.

    Biases are included. 0 if engines need only slices.
    """
    family, config = family_of(hf_config), text_fields(hf_config)
    if not family.whole_experts:
        return 0
    of_one = with_experts_of(config, 1)
    layers = range(config["num_hidden_layers"])
    shapes = (shape for layer in layers for row, shape in layer_parameters(family, of_one, layer) if row.kind in STACKS)
    return number_of_experts(config) * sum(map(prod, shapes))


def _attention(family: Family, config: Config, weights: list[int]) -> Attention:
    """Count attention. `weights`: of each layer. Gated delta nets have no pairs and no growing cache, and count as none.

    With latent attention (DeepSeek), training computes keys and values from the latent. In decoding, heads attend to the
    latent, and their up-projections are applied to query and output instead (arXiv 2405.04434, 2.1.2).
    """
    layers, heads = len(weights), config["num_attention_heads"]
    mean, least = sum(weights) // layers, min(weights)
    if family.latent:
        rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        trained = heads * (config["qk_nope_head_dim"] + rotary + config["v_head_dim"])
        latent = Attention(mean, trained, heads * (2 * rank + rotary), rank + rotary, trained, 1, least)
        return replace(latent, **_indexer(config)) if family.indexer else latent
    groups, size = config.get("num_key_value_heads") or heads, head_size(config)
    attending = sum(kind != "linear_attention" for kind in layer_kinds(config)) if family.delta_nets else layers
    pairs, cached = (count * size * attending // layers for count in (2 * heads, 2 * groups))
    window, windowed = _windows(family, config, layers)
    return Attention(mean, pairs, pairs, cached, cached, groups, least, window, windowed)


def _indexer(config: Config) -> dict[str, Any]:
    """Return the fields of `Attention` for sparse attention: a query sees as many keys as within a window of that length."""
    heads, size = config["index_n_heads"], config["index_head_dim"]
    matrices = heads * size * config["q_lora_rank"] + (size + heads) * config["hidden_size"]
    cached = config["kv_lora_rank"] + config["qk_rope_head_dim"] + size
    window = {"window": config["index_topk"], "windowed": 1.0}
    return {**window, "cached": cached, "indexer": matrices, "per_indexed_pair": heads * (size + 1)}


def _windows(family: Family, config: Config, layers: int) -> tuple[int, float]:
    """Return the size of sliding windows and the share of the layers that have them, from Megatron's fields.

    `window_attn_skip_freq` has a 1 for each layer with a window, or is the interval of the layers without one.
    """
    if not family.windows:
        return 0, 0.0
    settings = family.settings(config)
    of_layers = settings["window_attn_skip_freq"]
    windowed = sum(of_layers) if isinstance(of_layers, list) else layers - layers // of_layers
    return settings["window_size"][0] + 1, windowed / layers
