"""Fixes for Qwen2.5-VL in mbridge 0.15.1, and a forward pass for packed streams.

mbridge's forward pass takes padded rows, locates images by token id and computes positions. The one here takes a packed
stream with images and positions already prepared (`PackedStream`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import mbridge.models.qwen2_5_vl as package
import torch
from mbridge.models.qwen2_5_vl.attention import Qwen2_5VLSelfAttention
from mbridge.models.qwen2_5_vl.model import Qwen2_5VLModel
from mbridge.models.qwen2_5_vl.vision_model import VisionRotaryEmbedding
from megatron.core import tensor_parallel

from megarl.hf.config import text_fields
from megarl.hf.families.family import Family
from megarl.megatron.images import StreamImages
from megarl.megatron.model.bridge import TableWeights

_of_published_model = package.get_vision_model_config

_NORM_EPSILON = 1e-6  # of the vision tower, independent of the text model: hard-coded in the published model's code
_ROTARY_BASE = 10000.0  # of the vision tower, likewise


class VisionBridge(TableWeights, package.Qwen2_5VLBridge):
    """mbridge's bridge for Qwen2.5-VL, with weights from the family's table and the vision tower's sizes from config.json.

    mbridge uses the sizes of the published 7B model, the text model's norm epsilon, and its uneven or interleaved pipeline
    stages.
    """

    def __init__(self, family: Family, hf_config: Any, **arguments: Any) -> None:
        """Raises ValueError for a vision tower that mbridge would build differently."""
        self.family, self.fields = family, text_fields(hf_config.to_dict())
        _add_fields(hf_config)
        _fix_layers()
        super().__init__(hf_config, **arguments)

    def _model_provider(self, post_model_creation_callbacks: list[Callable[..., None]]) -> Callable[..., Any]:
        build = super()._model_provider(post_model_creation_callbacks)

        def build_with_vision(*args: Any, **kwargs: Any) -> Any:
            package.get_vision_model_config = partial(_tower_config, vision=self.hf_config.vision_config)
            model = build(*args, **kwargs)
            # Positions are already split for context parallel; Megatron would split them again.
            model.language_model.rotary_pos_emb.cp_group = None
            return model

        return build_with_vision


def _add_fields(hf_config: Any) -> None:
    """Copy the fields of the text section to the top level, and the rotary base to the name, where mbridge reads them."""
    for name, value in hf_config.text_config.to_dict().items():
        if value is not None and not hasattr(hf_config, name):
            setattr(hf_config, name, value)
    hf_config.rope_scaling = hf_config.text_config.rope_scaling
    hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
    if hf_config.vision_config.hidden_act != "silu":
        raise ValueError(
            f"vision_config.hidden_act is {hf_config.vision_config.hidden_act!r}; mbridge builds Qwen2.5-VL's vision "
            "tower with 'silu'."
        )
    if hf_config.vision_config.out_hidden_size != hf_config.hidden_size:
        raise ValueError(
            f"vision_config.out_hidden_size is {hf_config.vision_config.out_hidden_size}, the text part's hidden_size "
            f"{hf_config.hidden_size}: they must be equal."
        )


def _fix_layers() -> None:
    """Replace the functions of mbridge's modules that need a fix. Idempotent."""
    # mbridge warns that every such model is under development.
    logging.getLogger("mbridge.models.qwen2_5_vl.model").setLevel(logging.ERROR)
    if Qwen2_5VLModel.forward is not _forward:
        Qwen2_5VLSelfAttention.forward = _accepting_later_arguments(Qwen2_5VLSelfAttention.forward)
        VisionRotaryEmbedding.forward = _angles
        Qwen2_5VLModel.forward = _forward


def attention_by_token() -> type:
    """Return mbridge's self-attention, whose rotary angles belong to tokens instead of positions within sequences."""
    _fix_layers()
    attention: type = Qwen2_5VLSelfAttention
    return attention


def _tower_config(config: Any, *, vision: Any) -> Any:
    """Return the vision tower's TransformerConfig. `vision`: its section of config.json."""
    config = _of_published_model(config)
    config.num_layers, config.num_attention_heads = vision.depth, vision.num_heads
    config.hidden_size, config.ffn_hidden_size = vision.hidden_size, vision.intermediate_size
    config.kv_channels, config.num_query_groups = vision.hidden_size // vision.num_heads, vision.num_heads
    config.in_channels, config.patch_size = vision.in_channels, vision.patch_size
    config.temporal_patch_size, config.spatial_merge_size = vision.temporal_patch_size, vision.spatial_merge_size
    config.fullatt_block_indexes = list(vision.fullatt_block_indexes)
    config._qwen2_5_vl_window_size = vision.window_size
    config.layernorm_epsilon = _NORM_EPSILON
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    config.virtual_pipeline_model_parallel_size = None
    # Patches within a window attend to each other. A platform's attention may read this field instead of the layer's
    # mask type; the text model's "causal" would then apply to the tower.
    config.attention_mask_type = "no_mask"
    return config


def _accepting_later_arguments(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Accept the argument that Megatron 0.16 adds and only its inference engine sets."""

    def without(self: Any, *args: Any, rotary_pos_cos_sin: None = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return without


def _angles(self: Any, length: int) -> torch.Tensor:
    """Return the vision tower's rotary angles [length, dim / 2] in float32.

    mbridge keeps the frequencies in a buffer that becomes bfloat16 with the model: an error of several degrees.
    """
    size = 2 * len(self.inv_freq)
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=self.inv_freq.device)
    places = torch.arange(int(length), dtype=torch.float32, device=self.inv_freq.device)
    return torch.outer(places, 1.0 / _ROTARY_BASE ** (steps / size))


def _forward(
    self: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: None = None,
    packed_seq_params: Any = None,
    images: StreamImages | None = None,
) -> torch.Tensor:
    """Run the model on a packed stream [1, share] with positions [3, 1, share] and images; returns as GPTModel."""
    embeddings = None
    if self.pre_process:
        embeddings = self.language_model.embedding(input_ids=input_ids, position_ids=None)  # [share, 1, h]
        if images is not None:
            device = input_ids.device
            rows = self.vision_model(vision_data=images.pixels.to(device), grid_thw=images.grids.to(device))
            embeddings = with_rows(embeddings, rows.unsqueeze(1), images)
        if self.config.sequence_parallel:
            embeddings = tensor_parallel.scatter_to_sequence_parallel_region(embeddings)
    return self.language_model(
        input_ids=None,
        position_ids=position_ids,
        attention_mask=attention_mask,
        decoder_input=embeddings,
        packed_seq_params=packed_seq_params,
    )


def with_rows(stream: torch.Tensor, rows: torch.Tensor, images: StreamImages) -> torch.Tensor:
    """Return `stream` [share, ...] with a vision tower's `rows` [tokens of all images, ...] at the places of `images`."""
    device = stream.device
    return stream.index_put((images.places.to(device),), rows[images.rows.to(device)].to(stream.dtype))
