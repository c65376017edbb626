"""CUDA platform: NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from megarl.platform.base import Platform
from megarl.platform.cuda_kind import CUDA
from megarl.platform.ipc import DeviceMemory, open_device_memory, without_expandable_segments
from megarl.platform.transformer_engine import AttentionNeeds, attention_problem
from megarl.platform.version_sets import version_of


class CUDAPlatform(Platform):
    """CUDA devices with NCCL; with or without Transformer Engine."""

    kind = CUDA
    process_group_backend = "cpu:gloo,cuda:nccl"
    can_offload = True

    @property
    def uses_native_layers(self) -> bool:
        return importlib.util.find_spec("transformer_engine") is None

    def attention_problem(self, needs: AttentionNeeds) -> tuple[str, str] | None:
        return attention_problem(needs, torch.cuda.get_device_capability(self.device()), version_of("flash-attn"))

    @property
    def fuses_gradient_accumulation(self) -> bool:
        return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None  # of apex or Transformer Engine

    def prepare(self) -> None:
        """Do nothing: Megatron supports CUDA itself."""

    def trainer_env(self, timeout: float) -> dict[str, str]:
        # Megatron's overlap of communication and computation depends on the order in which kernels are queued.
        # Expandable segments avoid fragmentation, as micro batches vary in length.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    def rollout_env(self) -> dict[str, str]:
        # vLLM's sleep mode allocates from a separate pool without expandable segments: 0.32 disables them there, older
        # versions fail with them (device_allocator/cumem.py).
        return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}

    def deterministic_env(self) -> dict[str, str]:
        # cuBLAS workspaces as torch requires; Transformer Engine's attention; NCCL sums in a fixed ring order.
        return {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Ring",
        }

    def deterministic_rollout_env(self) -> dict[str, str]:
        return {"VLLM_BATCH_INVARIANT": "1"}

    def collective(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # A rank has one such group per weight sync peer. NCCL's buffers grow with the number of thread blocks, and two
        # blocks saturate a network card.
        options.config.max_ctas = 2
        # A peer's death must not end this process: the weight sync reports it.
        with _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            return dist.ProcessGroupNCCL(store, rank, size, options)

    def abort_collective(self, group: Any) -> None:
        group.abort()

    def shareable_memory(self, size: int) -> DeviceMemory:
        change = torch._C._accelerator_setAllocatorSettings
        with without_expandable_segments("PYTORCH_CUDA_ALLOC_CONF", change, whole=True):
            return DeviceMemory(torch.empty(size, dtype=torch.uint8, device=self.device()), "_share_cuda_")

    def open_shared(self, handle: dict[str, Any]) -> torch.Tensor:
        return open_device_memory(handle, self.device(), "_new_shared_cuda")


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set the environment variable `name` to `value` within the block."""
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if former is not None:
            os.environ[name] = former
