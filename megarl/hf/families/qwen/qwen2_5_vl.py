"""Qwen2.5-VL: Qwen2.5 with a vision tower."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import Family
from megarl.hf.families.rows import ATTENTION, DENSE, MODEL, TOWER_LAYER, prefixed, row
from megarl.hf.families.slices import Config, copy, gate_up

_TOWER = prefixed(
    (
        *TOWER_LAYER,
        row(gate_up, "mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        row(gate_up, "mlp.linear_fc1.bias", "mlp.gate_proj.bias", "mlp.up_proj.bias"),
        row(copy, "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
        row(copy, "mlp.linear_fc2.bias", "mlp.down_proj.bias"),
    ),
    "vision_model.decoder.layers.{layer}.",
    "visual.blocks.{layer}.",
)
_PROJECTION = (
    row(copy, "vision_model.patch_embed.proj.weight", "visual.patch_embed.proj.weight"),
    row(copy, "vision_model.decoder.final_layernorm.weight", "visual.merger.ln_q.weight"),
    row(copy, "vision_model.projection.encoder.linear_fc1.weight", "visual.merger.mlp.0.weight"),
    row(copy, "vision_model.projection.encoder.linear_fc1.bias", "visual.merger.mlp.0.bias"),
    row(copy, "vision_model.projection.encoder.linear_fc2.weight", "visual.merger.mlp.2.weight"),
    row(copy, "vision_model.projection.encoder.linear_fc2.bias", "visual.merger.mlp.2.bias"),
)


def _settings(config: Config) -> dict[str, Any]:
    return {"add_qkv_bias": True}


QWEN2_5_VL = Family(
    (*prefixed((*MODEL, *ATTENTION, *DENSE), "language_model.", ""), *_TOWER, *_PROJECTION),
    _settings,
    rotary=("default", "mrope"),
    prefix="language_model.",
    biased=True,
    tower=True,
)
