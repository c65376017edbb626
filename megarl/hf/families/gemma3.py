"""Gemma 3: sliding windows in most layers, with other rotary frequencies, and norms before and after each sublayer.

Checkpoints of 4B parameters and more have a vision tower, which is exported unchanged: the language model is trained on text.
"""

from __future__ import annotations

from typing import Any

from megarl.hf.config import layer_kinds
from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import ATTENTION, DENSE, MODEL, in_layers, prefixed, row
from megarl.hf.families.settings import rotary_of_kind
from megarl.hf.families.slices import Config, copy

_NORM = "mlp.linear_fc1.layer_norm_weight"
_NORMS = in_layers(
    row(copy, "self_attention.linear_proj.post_norm_weight", "post_attention_layernorm.weight"),
    row(copy, _NORM, "pre_feedforward_layernorm.weight"),
    row(copy, "mlp.linear_fc2.post_norm_weight", "post_feedforward_layernorm.weight"),
)
_ROWS = (*MODEL, *ATTENTION, *(each for each in DENSE if not each.parameter.endswith(_NORM)), *_NORMS)
_KINDS = ("sliding_attention", "full_attention")


def _settings(config: Config) -> dict[str, Any]:
    return {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "activation_func": "gelu_tanh",
        "bias_activation_fusion": False,  # Megatron has no fused gated GELU
        "softmax_scale": (config.get("query_pre_attn_scalar") or 256) ** -0.5,
        "window_size": ((config.get("sliding_window") or 4096) - 1, 0),  # keys before a query, and after it
        "window_attn_skip_freq": [int(kind == _KINDS[0]) for kind in layer_kinds(config)],
    }


def _unsupported(config: Config) -> Refusals:
    act, local = config.get("hidden_activation", "gelu_pytorch_tanh"), rotary_of_kind(config, _KINDS[0])
    yield act != "gelu_pytorch_tanh", f"hidden_activation: {act}"
    yield not config.get("sliding_window", 4096), f"sliding_window: {config.get('sliding_window')}"
    unknown = set(layer_kinds(config)).difference(_KINDS)
    yield bool(unknown), f"layer_types: {', '.join(sorted(unknown))}"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        yield bool(config.get(name)), f"{name}: {config.get(name)} (Gemma 2)"
    yield bool(config.get("use_bidirectional_attention")), "use_bidirectional_attention: true"
    yield local["rope_type"] != "default", f"rotary scaling {local['rope_type']!r} in layers with a sliding window"


GEMMA3_TEXT = Family(
    _ROWS,
    _settings,
    unsupported=_unsupported,
    rotary=("default", "linear"),
    windows=True,
    post_norms=True,
    scaled_embeddings=True,
    rotary_kinds=True,
)
GEMMA3 = Family(
    prefixed(_ROWS, "", "language_model."),
    _settings,
    unsupported=_unsupported,
    rotary=("default", "linear"),
    carried=("vision_tower.", "multi_modal_projector."),
    alone=("gemma3_text", "Gemma3ForCausalLM"),
    windows=True,
    post_norms=True,
    scaled_embeddings=True,
    rotary_kinds=True,
)
