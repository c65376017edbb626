"""What megarl asks of a device."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megarl.platform.tracing import TraceOptions

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from megarl.platform.device_kind import DeviceKind
    from megarl.platform.ipc import Shareable


class Profiler(Protocol):
    """torch's, or a device's own."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Platform(ABC):
    """One kind of device: its names, its environment, and the few calls that differ between kinds.

    A trainer process calls `prepare`, then `set_device`, only then imports Megatron, and calls `adapt` before model
    parallel is initialised.
    Engine processes take `rollout_env` and nothing else: what `prepare` patches is process-wide
    and would break an engine.
    """

    kind: DeviceKind
    process_group_backend: str  # for torch.distributed.init_process_group
    can_offload: bool  # the device has memory of its own, which moving tensors to the host frees
    overlaps_shared_experts: bool = (
        True  # linear layers skip their collectives where Megatron's shared experts ask for it
    )
    holds_values: bool = (
        True  # False: tensors have shapes and no memory, so that there is nothing to load or to compute
    )

    @property
    def name(self) -> str:
        """The value of cluster.device."""
        return self.kind.name

    @property
    def ray_resource(self) -> str | None:
        """What Ray counts; None where processes need no device."""
        return self.kind.ray_resource

    @property
    def visible_devices_env(self) -> str:
        """The variable that restricts a process to some devices; "" where there is none."""
        return self.kind.visible

    @property
    @abstractmethod
    def uses_native_layers(self) -> bool:
        """True where Transformer Engine is absent and megarl/megatron/native_layers.py stands in for it."""

    @abstractmethod
    def prepare(self) -> None:
        """Patch what must be patched before Megatron is imported. Idempotent; trainer processes only."""

    def adapt(self, settings: Mapping[str, Any]) -> None:
        """Tell what adapts Megatron to this device, where something does, how the process's model is laid out and
        computed. `settings`: under Megatron's names, as config_fields.adaptor_settings has them. The last call counts."""
        del settings  # Megatron needs no adapting

    def trainer_env(self, timeout: float) -> dict[str, str]:
        """Environment of a trainer process, to be set before it starts. `timeout`: the recipe's cluster.timeout."""
        return {}

    def deterministic_env(self) -> dict[str, str]:
        """What a trainer process needs in its environment for `train.deterministic`, besides what torch itself is told."""
        return {}

    def installation_notices(self) -> list[str]:
        """What this environment lacks for the device, or has in untested versions, and what that costs; for the start."""
        return []

    def rollout_env(self) -> dict[str, str]:
        """Environment of an engine process, to be set before it starts."""
        return {}

    def deterministic_rollout_env(self) -> dict[str, str]:
        """What an engine process needs besides for `train.deterministic`. Empty where engines need nothing for it."""
        return {}

    def engines_env(self, deterministic: bool) -> dict[str, str]:
        """`rollout_env`, with `deterministic_rollout_env` for recipes with `train.deterministic`."""
        return self.rollout_env() | (self.deterministic_rollout_env() if deterministic else {})

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Make device number `local_rank` (among the visible ones) this process's own."""

    @abstractmethod
    def device(self) -> torch.device:
        """This process's device."""

    @abstractmethod
    def device_name(self) -> str:
        """The model of this process's device, as its vendor's library names it: what `peaks.py` goes by."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached, unused device memory back."""

    @abstractmethod
    def peak_memory(self) -> float:
        """The most memory that this process has held so far, in GiB: of tensors on the device, or, where
        there is no device memory, of the whole process (resident)."""

    def free_memory(self) -> float | None:
        """Free memory of this process's device in GiB, whoever holds the rest; None where the device has none of its own."""
        return None

    def synchronize(self) -> None:
        """Wait until everything that was queued on this process's device is done."""

    @abstractmethod
    def collective(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """A group of processes (a c10d backend, outside of torch's default group) that broadcast tensors of this device to
        each other. `timeout`: of a collective. Blocks until all have come, or returns before, as the library does."""

    @abstractmethod
    def shareable_memory(self, size: int) -> Shareable:
        """Allocate `size` bytes on this process's device that other processes of the machine can map."""

    @abstractmethod
    def open_shared(self, handle: dict[str, Any]) -> torch.Tensor:
        """Map memory of another process on this machine: uint8 [size]. `handle`: of `Shareable.handle`, made for this process.
        Raises RuntimeError or OSError where it cannot be mapped."""

    def abort_collective(self, group: Any) -> None:
        """Call off what `group` has under way, where its library can: the other end is gone."""
        del group

    def profiler(self, directory: Path, name: str, options: TraceOptions) -> Profiler:
        """Return a profiler of this process between `start` and `stop`; the latter writes to `directory`, under `name`."""
        import torch.profiler as profiler

        host = profiler.ProfilerActivity.CPU
        kinds = profiler.supported_activities()  # CPU, and CUDA where there is one
        return profiler.profile(
            activities=[one for one in kinds if options.records("cpu" if one == host else "device")],
            record_shapes=options.records("shapes"),
            profile_memory=options.records("memory"),
            with_stack=options.records("stack"),
            on_trace_ready=lambda trace: trace.export_chrome_trace(str(directory / f"{name}.json.gz")),
        )

    @staticmethod
    def _assert_before_megatron() -> None:
        assert "megatron.core" not in sys.modules, "Platform.prepare() must run before megatron is imported"
