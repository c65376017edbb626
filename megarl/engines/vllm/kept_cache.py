"""Updates of weights that keep the KV cache of running requests (`EngineSpec.keep_cache`).

Prefixes of a version are not reused by later requests, because the version is part of their hashes (`cache_salt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.errors import RecipeError


def check(engine_args: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
    """Raise RecipeError if an engine cannot keep its KV cache. `config`: the model's config.json; None: not readable."""
    if config is not None and "vision_config" in config:
        raise RecipeError(
            "rollout.at_update",
            "vLLM caches encoded images without the version of the weights, so later requests would reuse old encodings",
            "set rollout.at_update=refresh, or drain",
            value="keep",
        )
    if engine_args.get("async_scheduling"):
        raise RecipeError(
            "rollout.engine_args.async_scheduling",
            "with rollout.at_update=keep, tokens that are sampled but not yet returned at an update would count as tokens of the "
            "new weights",
            "leave it out, or set rollout.at_update=refresh",
            value=True,
        )


def arguments() -> dict[str, Any]:
    """Return the arguments of vLLM with which every sampled token has been returned before an update."""
    return {"async_scheduling": False}
