"""Qwen3-VL's vision tower on Megatron's layers: patches of images -> rows for the text model, and features for its first layers.

Tensor parallel splits layers and mergers; patch and position embeddings are on every rank. Positions of patches are computed on
the host from the sizes of the images.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import build_module

from megarl.megatron.host_offsets import remember
from megarl.megatron.images import interpolation, patch_angles, patch_places

_NORM_EPSILON = 1e-6  # hard-coded in the published model's code


def tower_config(config: Any, vision: Any) -> Any:
    """Return the tower's TransformerConfig. `config`: the text model's; `vision`: the tower's section of config.json."""
    fields = {
        "num_layers": vision.depth,
        "hidden_size": vision.hidden_size,
        "ffn_hidden_size": vision.intermediate_size,
        "num_attention_heads": vision.num_heads,
        "num_query_groups": vision.num_heads,
        "kv_channels": vision.hidden_size // vision.num_heads,
        "normalization": "LayerNorm",
        "layernorm_epsilon": _NORM_EPSILON,
        "activation_func": partial(F.gelu, approximate="tanh"),
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "num_moe_experts": None,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "attention_softmax_in_fp32": True,
        "attention_mask_type": "no_mask",  # read by a platform's attention instead of the layer's mask type
        # Images are not split over ranks, and only the first pipeline stage has a tower.
        "sequence_parallel": False,
        "tp_comm_overlap": False,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
    }
    return _changed(config, fields)


def _changed(config: Any, fields: dict[str, Any]) -> Any:
    config = copy.copy(config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


class VisionTower(MegatronModule):
    """Layers of attention within each image, a merger for squares of patches, and a merger for each tapped layer.

    `attention`: the class of the layers' self-attention, which takes rotary angles by token. `width`: the text model's hidden
    size.
    """

    def __init__(self, config: Any, vision: Any, attention: type, width: int) -> None:
        super().__init__(config)
        self.merge = vision.spatial_merge_size
        self.taps = tuple(vision.deepstack_visual_indexes)
        self.side = int(vision.num_position_embeddings**0.5)
        placed = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        patch = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.patch_embed = torch.nn.Conv3d(vision.in_channels, vision.hidden_size, patch, patch, **placed)
        self.pos_embed = torch.nn.Embedding(vision.num_position_embeddings, vision.hidden_size, **placed)
        spec = get_vit_layer_with_transformer_engine_spec()
        spec.submodules.self_attention.module = attention
        self.layers = torch.nn.ModuleList(
            build_module(spec, config=config, layer_number=number + 1) for number in range(vision.depth)
        )
        merged = vision.hidden_size * self.merge**2
        of_merger = _changed(config, {"hidden_size": width, "ffn_hidden_size": merged, "activation_func": F.gelu})
        self.merger = Merger(of_merger, merged, vision.hidden_size)
        self.deepstack_layers = torch.nn.ModuleList(Merger(of_merger, merged, merged) for _ in self.taps)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [tokens, width] and features of the tapped layers [tokens, taps, width].

        `pixels`: [patches, values per patch]; `grids`: int64 [images, 3] on the host: frames, rows and columns of patches.
        """
        embed, sizes = self.patch_embed, grids.tolist()
        device = embed.weight.device
        places = torch.cat([patch_places(rows, columns, self.merge) for _, rows, columns in sizes])
        hidden = F.linear(pixels.to(embed.weight.dtype), embed.weight.flatten(1), embed.bias)
        hidden = (hidden + self._positions(places, sizes).to(hidden.dtype)).unsqueeze(1)
        angles = patch_angles(places, self.config.kv_channels).to(device)[:, None, None]
        params = _attend_within([rows * columns for _, rows, columns in sizes], device)
        features: list[torch.Tensor] = []
        for number, layer in enumerate(self.layers):
            hidden = self._run(layer, hidden, angles, params)
            if number in self.taps:
                features.append(self.deepstack_layers[len(features)](hidden))
        rows = self.merger(hidden)
        return rows, torch.stack(features, 1) if features else rows.new_zeros(len(rows), 0, rows.shape[1])

    def _positions(self, places: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
        """Return the position embedding of each patch [patches, hidden], interpolated between the four nearest."""
        counts = torch.tensor([rows * columns for _, rows, columns in sizes])
        limits = torch.tensor([[rows, columns] for _, rows, columns in sizes]).repeat_interleave(counts, 0)
        nearest, weights = (x.to(self.pos_embed.weight.device) for x in interpolation(places, limits, self.side))
        return (self.pos_embed(nearest) * weights.unsqueeze(-1)).sum(1)

    def _run(self, layer: Any, hidden: torch.Tensor, angles: torch.Tensor, params: Any) -> torch.Tensor:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = layer(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=params
            )[0]
            return output

        if self.config.recompute_granularity == "full" and self.training:
            recomputed: torch.Tensor = tensor_parallel.checkpoint(run, False, hidden)
            return recomputed
        return run(hidden)


class Merger(MegatronModule):
    """LayerNorm and an MLP that make one row of each square of patches, which are neighbors in the stream.

    `merged`: values of a square; `normed`: values that are normalized together.
    """

    def __init__(self, config: Any, merged: int, normed: int) -> None:
        super().__init__(config)
        placed = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.norm = torch.nn.LayerNorm(normed, eps=_NORM_EPSILON, **placed)
        linears = MLPSubmodules(
            linear_fc1=transformer_engine.TEColumnParallelLinear, linear_fc2=transformer_engine.TERowParallelLinear
        )
        self.mlp = MLP(config, linears, input_size=merged)
        self.normed, self.merged = normed, merged

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[patches, 1, hidden] -> [squares, width]."""
        rows, bias = self.mlp(self.norm(hidden.reshape(-1, self.normed)).view(-1, self.merged))
        return rows if bias is None else rows + bias


def _attend_within(lengths: list[int], device: torch.device) -> PackedSeqParams:
    """Return the parameters of packed attention within images of `lengths` patches."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    offsets, longest = ends.to(device, torch.int32), max(lengths)
    remember(offsets, ends.tolist())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
