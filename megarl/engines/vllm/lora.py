"""LoRA in vLLM: whether it can hold a recipe's adapters, and the arguments for them. Does not import vLLM."""

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
    """Return why an engine of `spec` on `device` cannot hold its adapters and needs merged weights; None if it can.

    `config`: the model's config.json.
    """
    assert spec.adapters is not None
    args = spec.engine_args
    reasons = {
        "vllm-ascend's kernels for adapters have not been compared with merged weights": device == "npu",
        f"vLLM supports adapters up to rank {_RANKS[-1]}, and lora.rank is {spec.adapters.rank}": (
            spec.adapters.rank > _RANKS[-1]
        ),
        "with adapters on any layer, vLLM uses other expert kernels, which a CPU lacks and which have not been compared with "
        "merged weights": number_of_experts(text_fields(config)) > 0,
        "vLLM drops adapters in the empty steps of engines in a group (rollout.data_parallel)": spec.data_parallel > 1,
        "its weights are quantized as they are loaded": bool(
            spec.quantization or args.get("quantization") or "quantization_config" in config
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def arguments(adapters: AdapterSpec, supported: Collection[str]) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter on its target linears.

    `supported`: argument names of the installed vLLM; empty if vLLM is not installed here.
    """
    args: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": held_rank(adapters.rank)}
    leaves = [target.rsplit(".", 1)[-1] for target in adapters.targets]
    if ALL in leaves:
        leaves = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    if not supported or "lora_target_modules" in supported:  # else vLLM wraps all linears, which costs time and memory
        args["lora_target_modules"] = sorted({_PACKED.get(leaf, leaf) for leaf in leaves})
    return args


def held_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` of vLLM for adapters of `rank`."""
    return next(maximum for maximum in _RANKS if maximum >= rank)
