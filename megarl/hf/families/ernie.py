"""ERNIE 4.5's mixtures of experts, on text."""

from __future__ import annotations

from typing import Any

from megarl.hf.config import shared_experts as count_shared
from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import ATTENTION, DENSE, EXPERTS, MODEL, in_layers, row, shared_experts
from megarl.hf.families.settings import mixture, sigmoid_routing
from megarl.hf.families.slices import Config, one_row

_BIAS = in_layers(row(one_row, "mlp.router.expert_bias", "mlp.moe_statics.e_score_correction_bias"))
_NORM_MIN = 1e-12  # least sum that divides routing weights


def _sparse(config: Config, layer: int) -> bool:
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index")
    within = first <= layer <= (config["num_hidden_layers"] if last in (None, -1) else last)
    return within and (layer + 1) % (config.get("moe_layer_interval") or 1) == 0


def _settings(config: Config) -> dict[str, Any]:
    return {
        **mixture(config),
        # Megatron has no routing bias with a softmax; megatron/moe/biased_softmax.py replaces the sigmoid.
        **sigmoid_routing(config),
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * count_shared(config) or None,
        "rotary_interleaved": True,
    }


def _unsupported(config: Config) -> Refusals:
    smallest, activation = config.get("moe_norm_min", _NORM_MIN), config.get("moe_gate_act") or "softmax"
    yield bool(config.get("use_bias")), "use_bias: true"
    yield smallest != _NORM_MIN, f"moe_norm_min: {smallest}, which vLLM does not apply"
    yield activation != "softmax", f"moe_gate_act: {activation}"
    yield not config.get("moe_use_aux_free", True), "moe_use_aux_free: false, a router without bias"


ERNIE4_5_MOE = Family(
    (*MODEL, *ATTENTION, *DENSE, *EXPERTS, *shared_experts("shared_experts"), *_BIAS),
    _settings,
    sparse=_sparse,
    unsupported=_unsupported,
    rotary=("default",),
    biased_softmax=True,
    carried=("model.mtp_",),
    numbered_prediction=False,
)
