"""`Platform`: the calls of trainer and engine processes that differ between device kinds."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megarl.platform.tracing import TraceOptions

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from megarl.platform.device_kind import DeviceKind
    from megarl.platform.ipc import DeviceMemory, HostMemory
    from megarl.platform.transformer_engine import AttentionNeeds


class Profiler(Protocol):
    """Interface of torch's profiler and of vendors' profilers."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Platform(ABC):
    """One device kind: its names, its environment variables, and the calls that differ between kinds.

    A trainer process calls `prepare`, then `set_device`, then imports Megatron, and calls `adapt` before it initializes
    model parallelism. Engine processes use only `rollout_env`: the patches of `prepare` are process-wide and would break
    an engine.
    """

    kind: DeviceKind
    process_group_backend: str  # for torch.distributed.init_process_group
    can_offload: bool  # the device has separate memory, which moving tensors to the host frees
    overlaps_shared_experts: bool = True  # linear layers can skip collectives for Megatron's overlapped shared experts
    holds_values: bool = True  # False: tensors have shapes but no memory, so nothing can be loaded or computed

    @property
    def name(self) -> str:
        """Name of the kind, as in cluster.device."""
        return self.kind.name

    @property
    @abstractmethod
    def uses_native_layers(self) -> bool:
        """True if Transformer Engine is missing and megarl/megatron/native_layers/ replaces it."""

    def attention_problem(self, needs: AttentionNeeds) -> tuple[str, str] | None:
        """Problem and remedy if Transformer Engine lacks a model's attention on this device; None if it has it."""
        del needs
        return None

    @property
    def fuses_gradient_accumulation(self) -> bool:
        """True if Megatron's `gradient_accumulation_fusion` has its kernel here."""
        return False

    @abstractmethod
    def prepare(self) -> None:
        """Apply the patches that must precede the import of Megatron. Idempotent; trainer processes only."""

    def adapt(self, settings: Mapping[str, Any]) -> None:
        """Configure the library that adapts Megatron to this device, if any. The last call counts.

        `settings`: layout and computation of the process's model, from `megatron.extra_settings.adaptor_settings`.
        """
        del settings  # Megatron supports this device itself

    def trainer_env(self, timeout: float) -> dict[str, str]:
        """Environment of a trainer process, to be set before it starts. `timeout`: the recipe's cluster.timeout."""
        return {}

    def deterministic_env(self) -> dict[str, str]:
        """Variables of a trainer process for `train.deterministic`, in addition to torch's own settings."""
        return {}

    def rollout_env(self) -> dict[str, str]:
        """Environment of an engine process, to be set before it starts."""
        return {}

    def deterministic_rollout_env(self) -> dict[str, str]:
        """Additional variables of an engine process for `train.deterministic`."""
        return {}

    def engines_env(self, deterministic: bool) -> dict[str, str]:
        """Environment of an engine process: `rollout_env`, and `deterministic_rollout_env` if `deterministic`."""
        return self.rollout_env() | (self.deterministic_rollout_env() if deterministic else {})

    @property
    def _api(self) -> Any:
        """torch's module for the device (`DeviceKind.torch_api`); kinds without a module override the methods that use it."""
        import torch

        return getattr(torch, self.kind.torch_api)

    def set_device(self, local_rank: int) -> None:
        """Use device number `local_rank` (among the visible ones) in this process."""
        self._api.set_device(local_rank)

    def device(self) -> torch.device:
        """Device of this process."""
        import torch

        return torch.device(self.kind.torch_api, self._api.current_device())

    def device_name(self) -> str:
        """Model name of this process's device from the vendor's library, for `device_table.device_of`."""
        return self._api.get_device_name()

    def empty_cache(self) -> None:
        """Release cached, unused device memory."""
        self._api.empty_cache()

    def peak_memory(self) -> float:
        """Peak memory of this process in GiB: of tensors on the device; on a CPU, resident memory of the process."""
        return self._api.max_memory_allocated() / 2**30

    def free_memory(self) -> float | None:
        """Free memory of this process's device in GiB; None if the device has no separate memory."""
        return self._api.mem_get_info()[0] / 2**30 if self.kind.torch_api else None

    def device_load(self) -> Callable[[], tuple[float, float]] | None:
        """Return a function that looks at this process's device, for `DeviceSampler`, in any thread; None if it has no counters."""
        if not self.kind.torch_api:
            return None
        api, number = self._api, self._api.current_device()  # of this thread

        def look() -> tuple[float, float]:
            free, total = api.mem_get_info(number)
            return 1 - free / total, api.utilization(number) / 100

        return look

    def synchronize(self) -> None:
        """Wait until all work queued on this process's device is done."""
        if self.kind.torch_api:
            self._api.synchronize()

    @abstractmethod
    def collective(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Create a process group (a c10d backend, outside of torch's default group) for broadcasts of device tensors.

        `timeout`: of each collective. Some libraries block until all ranks have joined, others return earlier.
        """

    @abstractmethod
    def shareable_memory(self, size: int) -> DeviceMemory | HostMemory:
        """Allocate `size` bytes on this process's device that other processes of the machine can map."""

    def shared_bucket_notice(self, environment: Mapping[str, str]) -> str | None:
        """Return a notice of a setting in `environment`, a trainer's variables, that `shareable_memory` resets; None without one."""
        return None

    @abstractmethod
    def open_shared(self, handle: dict[str, Any]) -> torch.Tensor:
        """Map memory of another process on this machine: uint8 [size]. `handle`: from the memory's `handle`.

        Raises RuntimeError or OSError if the memory cannot be mapped.
        """

    def abort_collective(self, group: Any) -> None:
        """Abort pending collectives of `group` after the loss of a peer, if the library supports it."""
        del group

    def profiler(self, directory: Path, name: str, options: TraceOptions) -> Profiler:
        """Return a profiler of this process; its `stop` writes the trace to `directory`, under `name`."""
        import torch.profiler as profiler

        host = profiler.ProfilerActivity.CPU
        supported = profiler.supported_activities()  # CPU, and CUDA if available
        return profiler.profile(
            activities=[activity for activity in supported if options.records("cpu" if activity == host else "device")],
            record_shapes=options.records("shapes"),
            profile_memory=options.records("memory"),
            with_stack=options.records("stack"),
            on_trace_ready=lambda trace: trace.export_chrome_trace(str(directory / f"{name}.json.gz")),
        )

    @staticmethod
    def _assert_before_megatron() -> None:
        assert "megatron.core" not in sys.modules, "Platform.prepare() must run before megatron is imported"
