"""Qwen3.5 and 3.6, dense and with experts: gated delta nets and gated attention.

Their checkpoints have a vision tower, which is exported unchanged: the language model is trained on text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.hf.families.family import Family
from megarl.hf.families.qwen.qwen3_next import GATED_SHARED_EXPERT, gated_attention, gated_mixture
from megarl.hf.families.qwen.text import one_expert_per_token
from megarl.hf.families.rows import DELTA_NET, DENSE, GATED_ATTENTION, MODEL, in_layers, row, stacked_experts, under
from megarl.hf.families.slices import Config, delta_by_part
from megarl.hf.families.stacks import expert_stack

_IN_PARTS = (f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
_LAYERS = (
    *MODEL,
    *GATED_ATTENTION,
    *DELTA_NET,
    *in_layers(row(delta_by_part, "self_attention.in_proj.weight", *_IN_PARTS)),
)
_CARRIED = ("model.visual.", "mtp.")
_WHOLE = "model.language_model."  # where checkpoints with a vision tower have the language model


def _dense(config: Config) -> dict[str, Any]:
    return gated_attention(config)


def _experts(config: Config) -> dict[str, Any]:
    return {**gated_attention(config), **gated_mixture(config)}


def _always(config: Config, layer: int) -> bool:
    return True


QWEN3_5_TEXT = Family((*_LAYERS, *DENSE), _dense, rotary=("default",), delta_nets=True)
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    rows=under(_WHOLE, QWEN3_5_TEXT.rows),
    carried=_CARRIED,
    alone=("qwen3_5_text", "Qwen3_5ForCausalLM"),
)
QWEN3_5_MOE_TEXT = Family(
    (*_LAYERS, *stacked_experts(expert_stack), *GATED_SHARED_EXPERT),
    _experts,
    sparse=_always,
    unsupported=one_expert_per_token,
    rotary=("default",),
    delta_nets=True,
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    rows=under(_WHOLE, QWEN3_5_MOE_TEXT.rows),
    carried=_CARRIED,
    alone=("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
)
