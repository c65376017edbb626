"""Qwen3-VL: a GPTModel with interleaved multimodal rotary embedding, and a vision tower that feeds its first layers (DeepStack)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.megatron.images import StreamImages
from megarl.megatron.model.bridge import FamilyBridge
from megarl.megatron.model.qwen2_5_vl import attention_by_token, with_rows
from megarl.megatron.model.qwen3_vl_tower import VisionTower, tower_config


class DeepStackBridge(FamilyBridge):
    """mbridge's bridge for the text model, and megarl's vision tower on the first pipeline stage."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            **super()._get_gptmodel_args(),
            "position_embedding_type": "mrope",
            "scatter_embedding_sequence_parallel": False,  # after images are placed
        }

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec = super()._get_transformer_layer_spec(vp_stage)
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
        for layer in spec.layer_specs:
            layer.module = DeepStackLayer
            layer.submodules.self_attention.module = attention_by_token()
        return spec

    def _model_provider(self, post_model_creation_callbacks: list[Callable[..., None]]) -> Callable[..., Any]:
        build = super()._model_provider([])

        def build_with_tower(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
            text, vision = build(pre_process, post_process, vp_stage), self.hf_config.vision_config
            text.rotary_pos_emb = InterleavedRotary(
                self.config.kv_channels, rotary_percent=1.0, rotary_base=text.rotary_base
            )
            tower = None
            if pre_process:
                sizes = tower_config(self.config, vision)
                tower = VisionTower(sizes, vision, attention_by_token(), self.config.hidden_size)
            model = DeepStackModel(text, tower)
            stage = {"pre_process": pre_process, "post_process": post_process}
            for callback in post_model_creation_callbacks:
                callback(model, config=self.config, hf_config=self.hf_config, **stage)
            return model

        return build_with_tower


class DeepStackModel(MegatronModule):
    """The text model of a pipeline stage, with the vision tower on the first."""

    def __init__(self, text: Any, tower: VisionTower | None) -> None:
        super().__init__(text.config)
        self.language_model, self.vision_model = text, tower
        # Read by Megatron's schedules and by finalize_model_grads.
        self.pre_process, self.post_process, self.model_type = text.pre_process, text.post_process, text.model_type
        self.share_embeddings_and_output_weights = text.share_embeddings_and_output_weights

    def shared_embedding_or_output_weight(self) -> Any:
        """Return the text model's, which Megatron sums over the first and last stage."""
        return self.language_model.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the hidden states from the previous stage."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None = None,
        packed_seq_params: Any = None,
        images: StreamImages | None = None,
    ) -> torch.Tensor:
        """Run the model on a packed stream [1, share] with positions [3, 1, share] and images; returns as GPTModel."""
        embeddings = features = None
        if self.vision_model is not None:
            embeddings = self.language_model.embedding(input_ids=input_ids, position_ids=None)  # [share, 1, h]
            if images is not None:
                device = input_ids.device
                rows, of_layers = self.vision_model(images.pixels.to(device), images.grids)
                embeddings = with_rows(embeddings, rows.unsqueeze(1), images)
                zeros = embeddings.new_zeros(len(embeddings), *of_layers.shape[1:])
                features = self._scattered(with_rows(zeros, of_layers, images))
            embeddings = self._scattered(embeddings)
        output: torch.Tensor = self.language_model(
            input_ids=None,
            position_ids=position_ids,
            attention_mask=attention_mask,
            decoder_input=embeddings,
            packed_seq_params=packed_seq_params,
            # Megatron hands `context` from layer to layer, also through recomputation.
            extra_block_kwargs=None if features is None else {"context": features},
        )
        return output

    def _scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this tensor-parallel rank's part of [share, ...]."""
        if not self.config.sequence_parallel:
            return rows
        part: torch.Tensor = tensor_parallel.scatter_to_sequence_parallel_region(rows)
        return part


class DeepStackLayer(TransformerLayer):
    """A layer of the text model that adds the vision tower's features for it to its output.

    The features of the first layers [share, layers, h] arrive as `context`, which is None on later pipeline stages and without
    images.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden states [share, 1, h], and `context` for the next layer."""
        hidden, features = super().forward(*args, **kwargs)
        if features is not None and self.layer_number <= features.shape[1]:
            hidden = hidden + features[:, self.layer_number - 1 : self.layer_number]
        return hidden, features


class InterleavedRotary(MultimodalRotaryEmbedding):
    """Rotary angles with interleaved sections. In Megatron's, time, row and column each have a block of frequencies.

    `mrope_section` counts frequencies of time, row and column. Row has the frequencies 1, 4, 7, ..., column 2, 5, 8, ..., and
    time the others.
    """

    def forward(self, position_ids: torch.Tensor, mrope_section: list[int], cp_group: Any = None) -> torch.Tensor:
        """Return angles [share, b, 1, size of a head] of positions [3, b, share] (time, row, column), which are split over
        context-parallel ranks."""
        axes = torch.zeros(len(self.inv_freq), dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * mrope_section[axis] : 3] = axis
        positions = position_ids.to(self.inv_freq)[axes.to(self.inv_freq.device)]  # [frequencies, b, share]
        angles = positions.permute(2, 1, 0) * self.inv_freq
        return torch.cat([angles, angles], -1).unsqueeze(2)
