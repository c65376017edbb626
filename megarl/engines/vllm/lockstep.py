"""Engines of a data-parallel group: in each step, all of them execute the model together."""

from __future__ import annotations

from typing import Any

from megarl.engines.group import EngineGroup, free_ports

_PORTS = 4  # consecutive ports of a group; vLLM uses two, for its engines and for its workers


def group_env(group: EngineGroup) -> dict[str, str]:
    """Return vLLM's environment for an engine of a data-parallel group that megarl starts. Collective.

    An engine sees only its own devices, so its local rank is 0.
    """
    return {
        "VLLM_DP_SIZE": str(group.size),
        "VLLM_DP_RANK": str(group.rank),
        "VLLM_DP_RANK_LOCAL": "0",
        "VLLM_DP_MASTER_IP": group.host,
        "VLLM_DP_MASTER_PORT": group.broadcast_from_first("vllm_port", lambda: str(free_ports(_PORTS))),
    }


class StepTracker:
    """`executed` becomes True when vLLM's engine core executes the model, which LLMEngine.step does not return."""

    def __init__(self, core: Any) -> None:
        self.executed = False
        original = core.step_fn

        def step_fn() -> tuple[Any, bool]:
            outputs, executed = original()
            self.executed = self.executed or executed
            return outputs, executed

        core.step_fn = step_fn
