"""Whether vLLM can hold a recipe's adapters beside a model's weights, and with which arguments. vLLM is not imported."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megarl.engines.base import AdapterSpec, EngineSpec
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.linears import ALL

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's `max_lora_rank` is one of these
_PACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
OWNED = (
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules", "default_mm_loras",
    "fully_sharded_loras", "enable_tower_connector_lora", "specialize_active_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras", "max_lora_cls_labels",
)  # fmt: skip


def merged_because(spec: EngineSpec, config: dict[str, Any], device: str) -> str | None:
    """Why an engine of `spec` on `device` cannot hold its adapters, and must be given merged weights; None: it can.
    `config`: the model's config.json."""
    assert spec.adapters is not None
    given = spec.engine_args
    reasons = {
        "vllm-ascend's kernels for adapters have not been held to merged weights": device == "npu",
        f"vLLM takes adapters up to rank {_RANKS[-1]}, and lora.rank is {spec.adapters.rank}": (
            spec.adapters.rank > _RANKS[-1]
        ),
        "once it takes adapters, wherever they are, vLLM computes experts by other kernels, which a CPU lacks and which have "
        "been held to merged weights nowhere": number_of_experts(text_fields(config)) > 0,
        "vLLM drops adapters in the empty steps of engines in a group (rollout.data_parallel)": spec.data_parallel > 1,
        "its weights are quantised as they are loaded": bool(
            given.get("quantization") or "quantization_config" in config
        ),
        "its layers are spread over pipeline stages": (given.get("pipeline_parallel_size") or 1) > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def arguments(adapters: AdapterSpec, known: Collection[str]) -> dict[str, Any]:
    """vLLM's own, of those it knows: one adapter, on the linears that have one. `known`: names of its arguments; none where
    vLLM is not installed here."""
    found: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": held_rank(adapters.rank)}
    leaves = [target.rsplit(".", 1)[-1] for target in adapters.targets]
    if ALL in leaves:
        leaves = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    if not known or "lora_target_modules" in known:  # else all linears are wrapped, which costs time and memory
        found["lora_target_modules"] = sorted({_PACKED.get(leaf, leaf) for leaf in leaves})
    return found


def held_rank(rank: int) -> int:
    """The rank that vLLM keeps room for."""
    return next(held for held in _RANKS if held >= rank)
