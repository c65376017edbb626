"""gpt-oss: attention sinks, sliding windows in every other layer, and experts with biases and a clamped activation."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import ATTENTION, MODEL, in_layers, row
from megarl.hf.families.settings import mixture, rotary_scaling
from megarl.hf.families.slices import Config, copy
from megarl.hf.families.stacks import expert_stack, interleaved_stack, transposed_stack

_SINKS = in_layers(
    row(copy, "self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    row(copy, "self_attention.core_attention.softmax_offset", "self_attn.sinks"),
)
_EXPERTS = in_layers(
    row(copy, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    row(copy, "mlp.router.weight", "mlp.router.weight"),
    row(copy, "mlp.router.bias", "mlp.router.bias"),
    row(interleaved_stack, "mlp.experts.linear_fc1.weight{expert}", "mlp.experts.gate_up_proj"),
    row(interleaved_stack, "mlp.experts.linear_fc1.bias{expert}", "mlp.experts.gate_up_proj_bias"),
    row(transposed_stack, "mlp.experts.linear_fc2.weight{expert}", "mlp.experts.down_proj"),
    row(expert_stack, "mlp.experts.linear_fc2.bias{expert}", "mlp.experts.down_proj_bias"),
)
_KINDS = ("sliding_attention", "full_attention")


def _always(config: Config, layer: int) -> bool:
    return True


def _settings(config: Config) -> dict[str, Any]:
    return {
        **mixture(config),
        "add_bias_linear": True,
        "bias_dropout_fusion": False,  # Megatron's experts with biases do not have it
        "activation_func": "quick_gelu",  # x * sigmoid(1.702 x)
        "activation_func_clamp_value": config.get("swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "window_size": ((config.get("sliding_window") or 128) - 1, 0),  # keys before a query, and after it
        "window_attn_skip_freq": 2,  # the second layer has none, the fourth, ...
    }


def _unsupported(config: Config) -> Refusals:
    kinds, scaling = config.get("layer_types") or (), rotary_scaling(config)
    yield config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"
    yield not config.get("attention_bias", True), "attention_bias: false, which engines do not read"
    yield not config.get("sliding_window", 128), f"sliding_window: {config.get('sliding_window')}"
    by_turns = all(kind == _KINDS[layer % 2] for layer, kind in enumerate(kinds))
    yield (
        not by_turns,
        "layer_types other than sliding_attention and full_attention by turns, which engines do not read",
    )
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        yield config.get(name, value) != value, f"{name}: {config.get(name)}, where engines have {value}"
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        yield scaling.get(name) is not None, f"rotary scaling with {name}, which engines do not read"


GPT_OSS = Family(
    (*MODEL, *ATTENTION, *_SINKS, *_EXPERTS),
    _settings,
    sparse=_always,
    unsupported=_unsupported,
    rotary=("yarn",),
    ties=False,
    biased=True,
    sinks=True,
    whole_experts=True,
    windows=True,
)
