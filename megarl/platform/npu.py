"""Ascend NPUs: torch_npu, and MindSpeed, which adapts Megatron to them."""

from __future__ import annotations

import math
import sys

import torch

from megarl.platform.base import Platform


class NPUPlatform(Platform):
    """Ascend devices with HCCL. MindSpeed supplies what Transformer Engine supplies on CUDA."""

    name = "npu"
    process_group_backend = "cpu:gloo,npu:hccl"
    ray_resource = "NPU"
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    can_offload = True

    @property
    def uses_native_layers(self) -> bool:
        return False  # MindSpeed patches Transformer Engine's classes

    def prepare(self) -> None:
        if "mindspeed.megatron_adaptor" in sys.modules:
            return
        self._assert_before_megatron()
        import torch_npu  # noqa: F401

        # MindSpeed reads sys.argv into a process-wide namespace, unknown flags included: ours are not for it.
        arguments, sys.argv = sys.argv, sys.argv[:1]
        try:
            import mindspeed.megatron_adaptor  # noqa: F401
        finally:
            sys.argv = arguments

    def trainer_env(self, timeout: float) -> dict[str, str]:
        return {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
            "TASK_QUEUE_ENABLE": "2",
            "HCCL_CONNECT_TIMEOUT": "3600",
            "HCCL_EXEC_TIMEOUT": str(math.ceil(timeout)),  # whole seconds
            **_MANY_PROCESSES,
        }

    def rollout_env(self) -> dict[str, str]:
        # No PYTORCH_NPU_ALLOC_CONF: vllm-ascend's sleep mode refuses expandable segments.
        return {
            "TASK_QUEUE_ENABLE": "1",  # 2 does not go with ACL graphs
            "HCCL_CONNECT_TIMEOUT": "3600",
            "HCCL_EXEC_TIMEOUT": "3600",
            "HCCL_OP_EXPANSION_MODE": "AIV",
            "VLLM_ASCEND_ENABLE_NZ": "0",  # weights keep their layout, so that they can be updated in place
            **_MANY_PROCESSES,
        }

    def set_device(self, local_rank: int) -> None:
        torch.npu.set_device(local_rank)

    def device(self) -> torch.device:
        return torch.device("npu", torch.npu.current_device())

    def device_name(self) -> str:
        return torch.npu.get_device_name()

    def empty_cache(self) -> None:
        torch.npu.empty_cache()

    def peak_memory(self) -> float:
        return torch.npu.max_memory_allocated() / 2**30


# Trainer and engine share a device when colocated: without ranges both bind HCCL's default port.
_MANY_PROCESSES = {"HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050", "HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050"}
