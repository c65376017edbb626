"""vLLM's output layer in float32: `head_dtype` in the overrides of config.json (vllm/config/model.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.engines import package_folder
from megarl.errors import RecipeError

OVERRIDE = {"head_dtype": "float32"}
_READER = ("model_executor", "layers", "logits_processor.py")
_REMEDY = "set megatron.fp32_head=false"


def check(engine_args: Mapping[str, Any], device: str) -> None:
    """Raise RecipeError if vLLM on `device` does not compute the output layer in float32, or an argument prevents it.

    vLLM's source is read. Without vLLM on this machine, the engine's start makes this check.
    """
    overrides = engine_args.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping) or "head_dtype" in overrides:
        raise RecipeError(
            "rollout.engine_args.hf_overrides",
            "megatron.fp32_head sets its head_dtype",
            "make it a mapping without head_dtype, or set megatron.fp32_head=false",
            value=overrides,
        )
    problem = _problem(device)
    if problem is not None:
        raise RecipeError("megatron.fp32_head", problem, _REMEDY, value=True)


def _problem(device: str) -> str | None:
    if device == "npu":
        return "vllm-ascend replaces vLLM's output layer with its own, which computes logits in the model's dtype"
    folder = package_folder("vllm")
    file = folder.joinpath(*_READER) if folder else None
    if file is not None and "head_dtype" not in (file.read_text(encoding="utf-8") if file.is_file() else ""):
        return "this version of vLLM computes logits in the model's dtype: it does not read head_dtype"
    return None
