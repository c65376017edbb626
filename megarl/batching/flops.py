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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.hf.shape import model_shape

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


def model_flops(hf_config: dict[str, Any]) -> ModelFlops:
    """Count the language model that a config.json describes.

    Raises ValueError for a `model_type` that is not in `COUNTED`: a count that nobody has checked would be a guess.
    """
    shape = model_shape(hf_config)
    return ModelFlops(per_token=2 * shape.active, per_pair=2 * shape.layers * shape.attention.per_pair)
