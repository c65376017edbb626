"""MindSpeed's Python sources in a process on a CPU: missing imports are mocks, and the kernels of a training step compute
on the CPU (`mindspeed_kernels`)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

MOCKED = ("torch_npu", "triton", "torchair", "scipy", "acl")


class MockModule(types.ModuleType):
    """A module that has any attribute."""

    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `MOCKED` packages, and everything below them, as mocks."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        mocked = name.split(".")[0] in MOCKED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mocked else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return MockModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = f"/nowhere/{module.__name__}.py"


def make_importable(source: str | Path) -> None:
    """Let this process import MindSpeed from the checkout `source`. Call before Megatron is imported."""
    sys.path.insert(0, str(source))
    sys.meta_path.insert(0, Finder())
    from megarl.platform import cpu

    is_cuda = cpu._is_cuda  # MindSpeed writes the device "npu" into some of its modules
    cpu._is_cuda = lambda device: is_cuda(device) or (isinstance(device, str) and device.startswith("npu"))
    cpu.CPUPlatform().prepare()  # gives torch.cuda, which MindSpeed uses, a meaning
    import torch
    import triton.runtime.driver

    torch.npu = MockModule("torch.npu")
    torch.npu.current_device = lambda: cpu.CPUPlatform().device()
    triton.runtime.driver.active.get_current_target.side_effect = RuntimeError  # MindSpeed then takes the CPU


def activate() -> Any:
    """Patch Megatron as a trainer on Ascend does. Returns a platform that computes on the CPU through MindSpeed."""
    from megarl.platform.cpu import CPUPlatform
    from megarl.platform.npu import NPUPlatform
    from tests.support import mindspeed_kernels

    class MindSpeedOnCPU(CPUPlatform):
        name, uses_native_layers, adapt = "npu", False, NPUPlatform.adapt  # type: ignore[assignment]
        overlaps_shared_experts = NPUPlatform.overlaps_shared_experts

    NPUPlatform().prepare()
    mindspeed_kernels.install()
    return MindSpeedOnCPU()
