"""NVIDIA GPUs."""

from __future__ import annotations

import importlib.util

import torch

from megarl.platform.base import Platform
from megarl.platform.cuda_kind import CUDA


class CUDAPlatform(Platform):
    """CUDA devices with NCCL; with or without Transformer Engine."""

    kind = CUDA
    process_group_backend = "cpu:gloo,cuda:nccl"
    can_offload = True

    @property
    def uses_native_layers(self) -> bool:
        return importlib.util.find_spec("transformer_engine") is None

    def prepare(self) -> None:
        """Nothing: Megatron is written for CUDA."""

    def trainer_env(self, timeout: float) -> dict[str, str]:
        # Megatron overlaps communication with computation by the order in which kernels are queued.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def deterministic_env(self) -> dict[str, str]:
        # cuBLAS's own buffers, as torch asks for; Transformer Engine's attention; NCCL's sums in rings, always the same.
        return {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Ring",
        }

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank)

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def peak_memory(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30
