"""verl's extension of vLLM's worker, for vLLM's CPU build: engine_kwargs.vllm.worker_extension_cls.

vLLM repacks the weights of linear layers for the CPU and drops the originals (`dispatch_cpu_unquantized_gemm`). verl's update loads
new weights into the originals (verl/workers/rollout/vllm_rollout/utils.py) and repacks them after it, so they are kept here.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils

_repack = utils.dispatch_cpu_unquantized_gemm


def _repack_and_keep(layer: Any, remove_weight: bool) -> None:
    del remove_weight
    _repack(layer, remove_weight=False)


utils.dispatch_cpu_unquantized_gemm = _repack_and_keep


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension; linear layers keep their weights."""
