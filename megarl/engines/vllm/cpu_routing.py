"""Routing biases of mixtures of experts, which vLLM's router for CPUs ignores without groups of experts.

ERNIE 4.5 and MiniMax-M2 choose experts by their scores plus a bias.
"""

from __future__ import annotations

import functools
from typing import Any


def fix_routing_biases_on_cpu() -> None:
    """Make vLLM's router for CPUs route with a bias as with one group of experts, where it applies the bias. Idempotent."""
    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:  # older versions route in the expert kernels, and ignore the bias there
        return

    original = CPURouter._compute_routing
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def compute_routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        biased = self.e_score_correction_bias is not None and self.scoring_func in ("softmax", "sigmoid")
        if biased and not self.use_grouped_topk and self.custom_routing_function is None:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return original(self, *args, **kwargs)

    CPURouter._compute_routing = compute_routing
