"""Qwen3-VL, dense and with experts: Qwen3 with a vision tower that also feeds the first layers of the text model (DeepStack)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.qwen.text import QWEN3, QWEN3_MOE, every_few, one_expert_per_token
from megarl.hf.families.rows import (
    ATTENTION,
    DEEPSTACK_TOWER,
    DENSE,
    MODEL,
    TableRow,
    prefixed,
    stacked_experts,
    under,
)
from megarl.hf.families.settings import rotary_scaling
from megarl.hf.families.slices import Config
from megarl.hf.families.stacks import transposed_stack

DEEPSTACK = (8, 16, 24)  # tapped layers of the tower if config.json names none


def _rows(*rows: TableRow) -> tuple[TableRow, ...]:
    return (*prefixed(under("model.language_model.", rows), "language_model.", ""), *DEEPSTACK_TOWER)


def _dense(config: Config) -> dict[str, Any]:
    return {**QWEN3.settings(config), "mrope_section": rotary_scaling(config).get("mrope_section")}


def _experts(config: Config) -> dict[str, Any]:
    return {**QWEN3_MOE.settings(config), **_dense(config), "moe_router_pre_softmax": False}


def _unsupported(config: Config) -> Refusals:
    vision, scaling = config.get("vision_config") or {}, rotary_scaling(config)
    deep, depth = list(vision.get("deepstack_visual_indexes", DEEPSTACK)), vision.get("depth", 27)
    width, act = vision.get("out_hidden_size"), vision.get("hidden_act", "gelu_pytorch_tanh")
    base = (vision.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    yield not config.get("text_config"), "the text model outside text_config, which transformers does not read"
    interleaved = scaling.get("mrope_interleaved") and scaling.get("mrope_section")
    yield not interleaved, "rotary scaling without mrope_interleaved: true and mrope_section"
    yield act != "gelu_pytorch_tanh", f"vision_config.hidden_act: {act}"
    yield width not in (None, config.get("hidden_size")), f"vision_config.out_hidden_size: {width}, not hidden_size"
    yield base != 10000.0, f"vision_config with rope_theta: {base:g}, where engines have 10000"
    ordered = deep == sorted(set(deep)) and max(deep, default=0) < depth
    yield not ordered, f"vision_config.deepstack_visual_indexes: {deep}, which are not layers in ascending order"
    layers = config.get("num_hidden_layers", 0)
    yield len(deep) > layers, f"{len(deep)} layers of DeepStack (deepstack_visual_indexes) in {layers} text layers"


def _unsupported_with_experts(config: Config) -> Refusals:
    yield from _unsupported(config)
    yield from one_expert_per_token(config)
    yield config.get("norm_topk_prob") is False, "norm_topk_prob: false, which transformers does not read"


QWEN3_VL = Family(
    _rows(*MODEL, *ATTENTION, *DENSE),
    _dense,
    unsupported=_unsupported,
    rotary=("default",),
    prefix="language_model.",
    tower=True,
    deepstack=True,
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    rows=_rows(*MODEL, *ATTENTION, *DENSE, *stacked_experts(transposed_stack)),
    settings=_experts,
    sparse=every_few,
    unsupported=_unsupported_with_experts,
)
