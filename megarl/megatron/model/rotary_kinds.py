"""Rotary frequencies that differ between layers with a sliding window and layers with full attention, as Gemma 3 has them.

Megatron computes the angles of a micro batch once. Here it computes the angles of both kinds of layers, and each layer takes the angles of its kind.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention

from megarl.hf.families.settings import rotary_of_kind
from megarl.hf.families.sizes import head_size
from megarl.hf.families.slices import Config

_KINDS = ("sliding_attention", "full_attention")


def frequencies(config: Config) -> torch.Tensor:
    """Return the rotary frequencies of both kinds of layers, those with a sliding window first: float32 [size of a head]."""
    return torch.cat([_frequencies(config, kind) for kind in _KINDS])


def _frequencies(config: Config, kind: str) -> torch.Tensor:
    rotary, size = rotary_of_kind(config, kind), head_size(config)
    inverse = 1.0 / (rotary["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    return inverse / rotary["factor"] if rotary["rope_type"] == "linear" else inverse


class AttentionOfKind(SelfAttention):
    """Attention that takes the angles of its kind of layer from `rotary_pos_emb` [positions, 1, 1, 2 * size of a head].

    Megatron repeats the frequencies: the four parts are for windows, full attention, windows, full attention.
    """

    def forward(
        self, hidden_states: Any, attention_mask: Any, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Return the output and no bias, as Megatron's attention does."""
        windowed = is_layer_window_attention(
            self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
        )
        of_kinds = rotary_pos_emb.unflatten(-1, (2, 2, -1))
        angles = of_kinds[..., 0 if windowed else 1, :].flatten(-2)
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=angles, **kwargs)


def install(layers: list[Any]) -> None:
    """Replace attention in the specs of a block's `layers`."""
    for number, layer in enumerate(layers):
        layers[number] = copy.deepcopy(layer)  # layers share their specs, and models in a process their modules
        layers[number].submodules.self_attention.module = AttentionOfKind
