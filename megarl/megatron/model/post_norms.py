"""Norms of the outputs of attention and of the MLP, before they are added to the hidden states, as Gemma 3 has them.

Megatron has norms only before a sublayer. Here the sublayer's last linear has the norm after it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from megarl.megatron.native_layers.norm_rotary import rms_norm


def install(layers: list[Any], provider: Any) -> None:
    """Replace the output projections of attention and of the MLP by projections with a norm, in the specs of a block's `layers`.

    `provider`: Megatron's spec provider.
    """
    linear = _with_norm(provider.row_parallel_linear())
    for layer in layers:
        layer.submodules.self_attention.submodules.linear_proj = linear
        layer.submodules.mlp.submodules.linear_fc2 = linear


@cache
def _with_norm(linear: type) -> type:
    """Return the row-parallel class `linear` with an RMSNorm of its output, for outputs of the hidden size, without biases."""

    class RowParallelLinearNorm(linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **arguments: Any) -> None:
            super().__init__(input_size, output_size, config=config, **arguments)
            device = torch.cuda.current_device()
            weight = torch.ones(output_size, dtype=config.params_dtype, device=device)
            self.post_norm_weight = torch.nn.Parameter(weight)
            self.post_norm_weight.sequence_parallel = config.sequence_parallel  # its gradient is summed over TP
            self.epsilon, self.zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
            """Return the normed output, as `linear` scatters it over tensor-parallel ranks, and no bias."""
            out, bias = super().forward(x, *args, **kwargs)
            assert bias is None, "no family has biases and norms after them"
            return rms_norm(out, self.post_norm_weight, self.epsilon, zero_centered=self.zero_centered), None

    return RowParallelLinearNorm
