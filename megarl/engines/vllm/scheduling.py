"""Asynchronous scheduling of vLLM, where a batch may still be in flight when weights change or the engine sleeps."""

from __future__ import annotations

from megarl.engines import package_folder
from megarl.engines.base import EngineSpec
from megarl.errors import RecipeError


def needs_synchronous_scheduling(spec: EngineSpec) -> bool:
    """Return True if vLLM must schedule synchronously.

    With a batch in flight, an update would lose or mislabel tokens, or vLLM forbids the reset of its prefix cache. Raises
    RecipeError if `engine_args` set asynchronous scheduling then.
    """
    problem = None
    if spec.at_update == "keep" or (spec.at_update == "refresh" and not _drops_stale_tokens()):
        problem = f"with rollout.at_update={spec.at_update} and this version of vLLM, it would lose or mislabel tokens at updates"
        remedy = "leave it out, or set rollout.at_update=drain"
    elif spec.return_routed_experts and spec.tensor_parallel == 1 and _keeps_experts_in_flight():
        problem = (
            "with megatron.routing_replay=rollout and rollout.tensor_parallel=1, this version of vLLM keeps a batch in flight "
            "after the last request, and the reset of its prefix cache then fails"
        )
        remedy = "leave it out"
    if problem is not None and spec.engine_args.get("async_scheduling"):
        raise RecipeError("rollout.engine_args.async_scheduling", problem, remedy, value=True)
    return problem is not None


def _drops_stale_tokens() -> bool:
    """Return whether vLLM's preemption drops exactly the tokens in flight. 0.18 drops a request's next token even if none is
    in flight (v1/core/sched/async_scheduler.py); 0.23 and later count them."""
    folder = package_folder("vllm")
    assert folder is not None, "vLLM is installed"
    return "discard_latest_async_tokens" not in (folder / "v1" / "request.py").read_text(encoding="utf-8")


def _keeps_experts_in_flight() -> bool:
    """Return True if this vLLM forbids a reset of the prefix cache while a worker in the engine's process has a batch in flight.

    Its buffer of routed experts (distributed/aux_output_connector) asserts it. Such a worker returns a batch's experts only when
    the next step asks for them, and none does after the last request; workers in other processes return them at once.
    """
    folder = package_folder("vllm")
    return folder is not None and (folder / "distributed" / "aux_output_connector").is_dir()
