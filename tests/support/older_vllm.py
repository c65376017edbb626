"""Fixes of the CPU backends of vLLM 0.18 and 0.23, which megarl supports on Ascend only. Imported in vLLM's workers:
tests/older_vllm_site."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

from packaging.version import Version

from megarl.engines.vllm.compat import local_experts
from megarl.engines.vllm.route_support import installed_version


def install() -> None:
    """Apply the fixes that the installed vLLM needs. Call before the worker starts and the model is built."""
    apply_expert_map()
    sample_with_seeds()
    version = installed_version()
    if version == "unknown" or Version(version) >= Version("0.19"):
        return
    start_without_preloads()
    keep_cache_size()


def apply_expert_map() -> None:
    """Make the expert kernels of older versions apply the expert map: see `compat.fix_expert_parallel_on_cpu`.

    0.18 and 0.23 have this class; without the fix, an engine with expert parallelism dies in the kernel.
    """
    try:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
    except ImportError:  # a later version
        return

    for name in ("forward_grouped_gemm", "forward_torch"):
        original = getattr(CPUFusedMOE, name)
        if not getattr(original, "maps_experts", False):
            setattr(CPUFusedMOE, name, _with_local_experts(original))


def _with_local_experts(forward: Any) -> Any:
    def mapped(self, layer, input, topk_weights, topk_ids, *args, **kwargs):
        if layer.expert_map is not None:
            topk_ids, topk_weights = local_experts(layer.expert_map, topk_ids, topk_weights)
        return forward(self, layer, input, topk_weights, topk_ids, *args, **kwargs)

    mapped.maps_experts = True
    return mapped


def start_without_preloads() -> None:
    """Start vLLM's CPU worker without libtcmalloc and libiomp in LD_PRELOAD.

    The libraries only improve speed. Later versions warn, but 0.18 refuses to start; it only checks the variable
    (v1/worker/cpu_worker.py:57).
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.init_device

    def init_device(self):
        try:
            return original(self)
        except RuntimeError as error:
            if "is not found in LD_PRELOAD" not in str(error):
                raise
        named = f"{os.environ.get('LD_PRELOAD', '')}:libtcmalloc:libiomp"
        with patch.dict(os.environ, LD_PRELOAD=named):
            return original(self)

    CPUWorker.init_device = init_device


def keep_cache_size() -> None:
    """Apply `kv_cache_memory_bytes` to the KV cache on a CPU.

    Until 0.18 the worker takes half of the machine's memory instead (v1/worker/cpu_worker.py:136, platforms/cpu.py:126).
    """
    from vllm.config import CacheConfig
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.determine_available_memory
    if "cpu_kvcache_space_bytes" in getattr(CacheConfig, "__dataclass_fields__", ()):
        CPUWorker.determine_available_memory = lambda self: self.cache_config.kv_cache_memory_bytes or original(self)


def sample_with_seeds() -> None:
    """Sample with the functions of other devices.

    The CPU's of 0.18 and 0.23 ignores all seeds of a step in which a request has none, e.g. a greedy one
    (v1/sample/ops/topk_topp_sampler.py:203). In 0.18 it also crashes with a segmentation fault if an earlier engine of the process
    has sampled, since it is compiled at its first call.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native
