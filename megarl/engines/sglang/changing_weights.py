"""Rules for engines of the policy, which receive changing weights from the trainers: no KV caches outside the engine, and no
drafts with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.errors import RecipeError

# Arguments that keep KV caches in a store outside the engine (mem_cache/registry.py, mem_cache/storage/). Its keys have no version of
# the weights, and flushing the engine's cache does not clear it.
_OUTSIDE_CACHES = (
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
)
_WITHOUT_WEIGHTS = ("NGRAM", "NONE")  # of `SpeculativeAlgorithm` (speculative/spec_info.py), which reads any case


def check(engine_args: Mapping[str, Any], section: str) -> None:
    """Raise RecipeError for an argument with which an update hangs, or samples would use KV caches of earlier weights."""
    for name in _OUTSIDE_CACHES:
        if engine_args.get(name):
            cause = "KV caches outside the engine survive updates of the weights, and would be reused"
            raise RecipeError(f"{section}.engine_args.{name}", cause, "leave it out", value=engine_args[name])
    algorithm = engine_args.get("speculative_algorithm")
    if algorithm is not None and str(algorithm).upper() not in _WITHOUT_WEIGHTS:
        cause = (
            "SGLang loads each update once for the policy and once for the draft, which would wait for weights that trainers "
            "send only once"
        )
        remedy = "choose NGRAM, which has no draft, or leave it out"
        raise RecipeError(f"{section}.engine_args.speculative_algorithm", cause, remedy, value=algorithm)
