"""Model FLOPs of a forward pass, from a Hugging Face config.json: for MFU and for balancing micro batches. Pure functions.

Model FLOPs count the mathematics of the model, independent of the implementation:

- matrix products only, 2 x m x n x k each; no norms, activations, softmax or embedding look-ups;
- causal attention: l (l + 1) / 2 pairs for a sequence of l tokens, half of the square that a kernel without causal
  skipping computes;
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

from megarl.hf.shape import model_shape

FORWARD, FORWARD_BACKWARD = 1, 3
"""FLOPs of a phase as a multiple of the forward pass."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one forward pass: `per_token` for each token, `per_pair` for each (query, key) pair in a sequence."""

    per_token: int
    per_pair: int

    def of(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the FLOPs of each sequence's forward pass: lengths in tokens [B] -> float64 [B]."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.per_token * tokens + self.per_pair * (tokens * (tokens + 1) / 2)

    def of_update(self, lengths: Sequence[int] | np.ndarray, *, frozen: bool = False) -> np.ndarray:
        """Return the FLOPs of each sequence's forward and backward pass, float64 [B].

        `frozen`: the weights get no gradient (LoRA), so their products count twice instead of three times; attention
        has no weights.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return FORWARD_BACKWARD * self.of(lengths) - frozen * self.per_token * tokens


def model_flops(hf_config: dict[str, Any]) -> ModelFlops:
    """Count the language model of a config.json.

    Raises ValueError for a `model_type` of no family: an unchecked count would be a guess.
    """
    shape = model_shape(hf_config)
    return ModelFlops(per_token=2 * shape.active, per_pair=2 * shape.layers * shape.attention.per_pair)
