"""Model FLOPs of a forward pass, from a Hugging Face config.json: what MFU is counted from, and micro batches balanced by. Pure.

Model FLOPs are what the mathematics of the model asks for, however it is computed:

- matrix products alone, 2 x m x n x k each; norms, activations, softmax, embedding look-ups are left out;
- attention of a causal model: a token attends to itself and to those before it, l (l + 1) / 2 pairs of a sequence of
  l tokens, half of the square that a kernel without causal skipping computes;
- a mixture of experts: the experts that a token is sent to, the shared ones and the router; no capacity, no padding;
- the output layer for every token; a backward pass costs twice the forward pass;
- nothing that is computed again (activation recomputation, logits by blocks), padding, or fillers.

Left out as well: a vision tower and its projector (the language part of a vision-language model counts its image tokens
like any others), multi-token-prediction layers, which are not trained, and adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.model_config import number_of_experts, text_fields

Config = dict[str, Any]

FORWARD, FORWARD_BACKWARD = 1, 3
"""How many times the forward pass's FLOPs a phase needs."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one forward pass: `per_token` for each token, `per_pair` for each (query, key) pair of a sequence."""

    per_token: int
    per_pair: int

    def of(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Lengths in tokens [B] -> FLOPs of each sequence's forward pass, float64 [B]: a l + b l^2."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.per_token * tokens + self.per_pair * (tokens * (tokens + 1) / 2)

    def of_update(self, lengths: Sequence[int] | np.ndarray, *, frozen: bool = False) -> np.ndarray:
        """Forward and backward pass of each sequence, float64 [B]. `frozen`: weights get no gradient (adapters are
        trained instead), so their products come twice and not three times; attention has no weights to freeze."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return FORWARD_BACKWARD * self.of(lengths) - frozen * self.per_token * tokens


def model_flops(hf_config: Config) -> ModelFlops:
    """Count the language model that a config.json describes.

    Raises ValueError for a `model_type` that is not in `COUNTED`: a count that nobody has checked would be a guess.
    """
    kind = hf_config.get("model_type", "")
    if kind not in COUNTED:
        raise ValueError(f"FLOPs of a {kind!r} model are not counted; those of {', '.join(sorted(COUNTED))} are.")
    config = text_fields(hf_config)
    hidden = config["hidden_size"]
    attention = _latent_attention(config) if config.get("kv_lora_rank") else _attention(config)
    layers = sum(
        attention.per_token + 2 * hidden * (_experts_width(config) if sparse else 3 * config["intermediate_size"])
        for sparse in _sparse_layers(config, COUNTED[kind])
    )
    return ModelFlops(
        per_token=layers + 2 * hidden * config["vocab_size"],
        per_pair=config["num_hidden_layers"] * attention.per_pair,
    )


def _attention(config: Config) -> ModelFlops:
    """Multi-head or grouped-query attention of one layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    projected = (heads + 2 * groups) * size + heads * size  # query, key, value; and out
    return ModelFlops(2 * hidden * projected, 2 * heads * 2 * size)


def _latent_attention(config: Config) -> ModelFlops:
    """Multi-head latent attention (DeepSeek) of one layer, as it is trained: keys and values made from the latent."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query_rank, query = config.get("q_lora_rank"), heads * (plain + rotary)
    weights = hidden * query_rank + query_rank * query if query_rank else hidden * query
    weights += hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
    return ModelFlops(2 * weights, 2 * heads * (plain + rotary + value))


def _experts_width(config: Config) -> int:
    """Rows of hidden size that a token is multiplied with in a sparse layer: router, routed and shared experts."""
    routed = config.get("moe_intermediate_size") or config["intermediate_size"]
    width = number_of_experts(config) + 3 * routed * config["num_experts_per_tok"]
    width += 3 * routed * (config.get("n_shared_experts") or 0)
    if shared := config.get("shared_expert_intermediate_size"):
        width += 3 * shared + 1  # and its gate
    return width


def _sparse_layers(config: Config, sparse: Callable[[Config, int], bool]) -> list[bool]:
    """For each layer, whether it is a mixture of experts."""
    return [sparse(config, layer) for layer in range(config["num_hidden_layers"])]


def _never(config: Config, layer: int) -> bool:
    return False


def _always(config: Config, layer: int) -> bool:
    return True


def _every_few(config: Config, layer: int) -> bool:
    dense = layer in (config.get("mlp_only_layers") or [])
    return not dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _after_the_first(config: Config, layer: int) -> bool:
    return layer >= config.get("first_k_dense_replace", 0)


COUNTED: dict[str, Callable[[Config, int], bool]] = {
    "llama": _never,
    "qwen2": _never,
    "qwen3": _never,
    "qwen2_5_vl": _never,
    "mixtral": _always,
    "qwen2_moe": _every_few,
    "qwen3_moe": _every_few,
    "deepseek_v3": _after_the_first,
    "glm4_moe": _after_the_first,
}
"""Model types that are counted, and which of their layers (configuration, layer from 0) are mixtures of experts."""
