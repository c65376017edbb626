"""Asynchronous scheduling of vLLM, if weights change while requests run."""

from __future__ import annotations

from megarl.engines import package_folder
from megarl.engines.base import EngineSpec
from megarl.errors import RecipeError


def needs_synchronous_scheduling(spec: EngineSpec) -> bool:
    """Return whether each sampled token must have been returned when an update starts.

    Raises RecipeError if `engine_args` set asynchronous scheduling then.
    """
    needed = spec.at_update == "keep" or (spec.at_update == "refresh" and not _drops_stale_tokens())
    if needed and spec.engine_args.get("async_scheduling"):
        raise RecipeError(
            "rollout.engine_args.async_scheduling",
            f"with rollout.at_update={spec.at_update} and this version of vLLM, it would lose or mislabel tokens at updates",
            "leave it out, or set rollout.at_update=drain",
            value=True,
        )
    return needed


def _drops_stale_tokens() -> bool:
    """Return whether vLLM's preemption drops exactly the tokens in flight. 0.18 drops a request's next token even if none is
    in flight (v1/core/sched/async_scheduler.py); 0.23 and later count them."""
    folder = package_folder("vllm")
    assert folder is not None, "vLLM is installed"
    return "discard_latest_async_tokens" not in (folder / "v1" / "request.py").read_text(encoding="utf-8")
