"""Devices, and what must be patched before Megatron is imported. Imports no torch by itself."""

from __future__ import annotations

import importlib.util

from megarl.platform.base import Platform

__all__ = ["Platform", "kind", "select"]


def kind(device: str = "auto") -> str:
    """The kind of device that `select` takes for it: "cpu", "cuda" or "npu", whether it is there or not."""
    if device != "auto":
        return device
    return "npu" if _has_npu() else "cuda" if _has_cuda() else "cpu"


def select(device: str = "auto") -> Platform:
    """The platform for `device`: "auto", "cpu", "cuda" or "npu" (recipe key `cluster.device`).

    auto takes the NPU where torch_npu is installed, else CUDA where torch sees a GPU, else the CPU.
    Raises ValueError for a device that this machine does not have, and for an unknown name.
    """
    device = kind(device)
    if device == "cpu":
        from megarl.platform.cpu import CPUPlatform

        return CPUPlatform()
    if device == "cuda":
        if not _has_cuda():
            raise ValueError(
                "cluster.device is cuda, but torch.cuda.is_available() is False on this machine: "
                "no visible GPU, or a torch built without CUDA. Install a CUDA build of torch, or set cluster.device: cpu."
            )
        from megarl.platform.cuda import CUDAPlatform

        return CUDAPlatform()
    if device == "npu":
        if not _has_npu():
            raise ValueError(
                "cluster.device is npu, but torch_npu is not installed in this environment. "
                "Install torch_npu (see Dockerfile.npu), or set cluster.device: cpu."
            )
        from megarl.platform.npu import NPUPlatform

        return NPUPlatform()
    raise ValueError(f"cluster.device is {device!r}; it must be auto, cpu, cuda or npu.")


def _has_npu() -> bool:
    return importlib.util.find_spec("torch_npu") is not None


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
