"""Arguments of vLLM that engines of the policy cannot have, because their weights come from the trainers and change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.errors import RecipeError

_OUTSIDE_CACHES = ("kv_transfer_config", "kv_offloading_size")
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that guess from the tokens so far (vllm/config/speculative.py, `SpeculativeMethod`)."""


def check(engine_args: Mapping[str, Any]) -> None:
    """Raise RecipeError for an argument with which an engine would use other weights than the trainers'."""
    for name in _OUTSIDE_CACHES:
        if engine_args.get(name):
            cause = "KV caches outside the device would survive updates of the weights, and be reused"
            raise RecipeError(f"rollout.engine_args.{name}", cause, "leave it out", value=engine_args[name])
    speculation = engine_args.get("speculative_config")
    if isinstance(speculation, Mapping) and speculation.get("method") not in _WITHOUT_WEIGHTS:
        cause = (
            "its draft would have random weights: the trainers send the policy's alone, without a draft model or layers for "
            "multi-token prediction"
        )
        remedy = f"choose a method that has no weights ({', '.join(_WITHOUT_WEIGHTS)}), or leave speculative_config out"
        method = speculation.get("method")
        raise RecipeError("rollout.engine_args.speculative_config.method", cause, remedy, value=method)
