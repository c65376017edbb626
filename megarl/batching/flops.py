"""Model FLOPs of a forward pass, from a Hugging Face config.json: for MFU and for balancing micro batches. Pure functions.

Model FLOPs count the mathematics of the model, independent of the implementation:

- matrix products only, 2 x m x n x k each; no norms, activations, softmax or embedding look-ups;
- causal attention: l (l + 1) / 2 pairs for a sequence of l tokens, half of the square that a kernel without causal
  skipping computes, and only the pairs within the window in layers that have one, or as many as an indexer selects;
- mixture of experts: the routed experts of a token, the shared experts and the router; no capacity, no padding;
- the output layer for every token; a backward pass costs twice the forward pass;
- no recomputation (activations, logits by blocks), padding, or fillers.

Not counted: a vision tower and its projector (the language model counts image tokens like any other token),
multi-token-prediction layers (never trained), and adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.hf.shape import Attention, ModelShape, model_shape

FORWARD, FORWARD_BACKWARD = 1, 3
"""FLOPs of a phase as a multiple of the forward pass."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one forward pass: `per_token` for each token, `per_pair` for each (query, key) pair in a sequence.

    `windowed`: share of the layers in which a query sees only the last `window` keys.
    """

    per_token: int
    per_pair: int
    window: int = 0
    windowed: float = 0.0
    indexer_per_token: int = 0  # part of `per_token`, of indexers, which get no gradient
    indexer_per_pair: int = 0  # of indexers, for all pairs of causal attention

    def of(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the FLOPs of each sequence's forward pass: lengths in tokens [B] -> float64 [B]."""
        tokens = np.asarray(lengths, dtype=np.float64)
        indexed = self.indexer_per_pair * pairs(tokens, 0, 0.0)
        return self.per_token * tokens + self.per_pair * pairs(tokens, self.window, self.windowed) + indexed

    def of_update(self, lengths: Sequence[int] | np.ndarray, *, frozen: bool = False) -> np.ndarray:
        """Return the FLOPs of each sequence's forward and backward pass, float64 [B].

        `frozen`: the weights get no gradient (LoRA), so their products count twice instead of three times; attention
        has no weights.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        indexers = self.indexer_per_token * tokens + self.indexer_per_pair * pairs(tokens, 0, 0.0)
        return FORWARD_BACKWARD * self.of(lengths) - frozen * self.per_token * tokens - 2 * indexers


def model_flops(hf_config: dict[str, Any]) -> ModelFlops:
    """Count the language model of a config.json.

    Raises ValueError for a `model_type` of no family: an unchecked count would be a guess.
    """
    return shape_flops(model_shape(hf_config))


def shape_flops(shape: ModelShape, *, output: bool = True) -> ModelFlops:
    """Count a model of `shape`. `output`: with the output layer."""
    attention, weights = shape.attention, shape.active - (0 if output else shape.output)
    return ModelFlops(
        2 * weights,
        2 * shape.layers * attention.per_pair,
        attention.window,
        attention.windowed,
        2 * shape.layers * attention.indexer,
        2 * shape.layers * attention.per_indexed_pair,
    )


def visible_pairs(attention: Attention, lengths: np.ndarray) -> np.ndarray:
    """Return the (query, key) pairs of each sequence that a layer computes, as the mean over layers: float64 [B]."""
    return pairs(np.asarray(lengths, dtype=np.float64), attention.window, attention.windowed)


def pairs(tokens: np.ndarray, window: int, windowed: float) -> np.ndarray:
    """Return the pairs of causal attention, of which a share `windowed` of the layers lacks those beyond `window`."""
    beyond = np.maximum(tokens - window, 0.0)
    return tokens * (tokens + 1) / 2 - windowed * beyond * (beyond + 1) / 2
