"""Ascend platform: NPUs with torch_npu and MindSpeed, which adapts Megatron to them."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megarl.platform.base import Platform, Profiler
from megarl.platform.ipc import EXPANDABLE_SEGMENTS, DeviceMemory, open_device_memory, without_expandable_segments
from megarl.platform.mindspeed import settings as mindspeed
from megarl.platform.mindspeed.build_lock import build_in_turn, separate_build_folder
from megarl.platform.npu_kind import NPU
from megarl.platform.tracing import TraceOptions


class NPUPlatform(Platform):
    """Ascend devices with HCCL. MindSpeed replaces Transformer Engine."""

    kind = NPU
    process_group_backend = "cpu:gloo,npu:hccl"
    can_offload = True
    # MindSpeed's column-parallel linear ignores `parallel_mode` and always gathers the sequence. Megatron sets that mode to
    # skip the gather for overlapped shared experts (core_r0.16.0, mindspeed/te/pytorch/module/linear.py:315).
    overlaps_shared_experts = False

    @property
    def uses_native_layers(self) -> bool:
        return False  # MindSpeed patches Transformer Engine's classes

    def prepare(self) -> None:
        if "mindspeed.megatron_adaptor" in sys.modules:
            return
        self._assert_before_megatron()
        import torch_npu  # noqa: F401

        # MindSpeed parses sys.argv into a process-wide namespace, unknown flags included, so megarl's are removed.
        arguments, sys.argv = sys.argv, sys.argv[:1]
        try:
            with _without_aliases():
                import mindspeed.megatron_adaptor  # noqa: F401
        finally:
            sys.argv = arguments
        from mindspeed.op_builder.builder import MindSpeedOpBuilder

        separate_build_folder()
        build_in_turn(MindSpeedOpBuilder)

    def adapt(self, settings: Mapping[str, Any]) -> None:
        from mindspeed.megatron_adaptor import repatch

        try:
            with _without_aliases():
                repatch(mindspeed.arguments(settings))
        except ModuleNotFoundError as error:
            raise ValueError(
                f"MindSpeed needs the module {error.name} for a setting in megatron.extra: leave the setting out, or install "
                "the module (megatron.training is in a checkout of Megatron-LM, not in megatron-core)."
            ) from error

    def trainer_env(self, timeout: float) -> dict[str, str]:
        return {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
            "TASK_QUEUE_ENABLE": "2",
            # Whole seconds; CANN limits the first to this range.
            "HCCL_CONNECT_TIMEOUT": str(min(max(math.ceil(timeout), 120), 7200)),
            "HCCL_EXEC_TIMEOUT": str(math.ceil(timeout)),
            **_MANY_PROCESSES,
            **_MANY_GROUPS,
        }

    def deterministic_env(self) -> dict[str, str]:
        # Fixed order of sums in collectives, in matrix products over their inner dimension, and in ATB.
        return {
            "HCCL_DETERMINISTIC": "true",
            "LCCL_DETERMINISTIC": "1",
            "CLOSE_MATMUL_K_SHIFT": "1",
            "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
        }

    def rollout_env(self) -> dict[str, str]:
        return {
            # vllm-ascend's sleep mode rejects expandable segments, which an engine under torchrun would inherit.
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
            # torch_npu captures no graphs at 2, vllm-ascend none at 1 (`rollout_env` of megarl/engines/__init__.py).
            "TASK_QUEUE_ENABLE": "1",
            "ASCEND_LAUNCH_BLOCKING": "0",
            "HCCL_CONNECT_TIMEOUT": "3600",
            "HCCL_EXEC_TIMEOUT": "3600",
            "HCCL_OP_EXPANSION_MODE": "AIV",
            "VLLM_ASCEND_ENABLE_NZ": "0",  # weights keep their layout, which in-place updates need
            **_MANY_PROCESSES,
            **_MANY_GROUPS,
        }

    def deterministic_rollout_env(self) -> dict[str, str]:
        # vllm-ascend sets the last two itself, but late in its start (batch_invariant.py, override_envs_for_invariance).
        return {"VLLM_BATCH_INVARIANT": "1", "HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}

    def collective(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = timeout
        # Without ranks, torch_npu would make this group its default group.
        options.global_ranks_in_group = list(range(size))
        options.group_id = f"megarl-{next(_GROUPS)}"
        options.hccl_config = {
            # A rank has one such group per weight sync peer. HCCL allocates twice this size, in MiB; its default is 200.
            "hccl_buffer_size": 16,
            # On the host. Both ends must agree, and the engines' environment has another mode (`rollout_env`).
            "hccl_op_expansion_mode": 1,
        }
        return ProcessGroupHCCL(store, rank, size, options)

    def abort_collective(self, group: Any) -> None:
        group.clear_workmeta_list()  # otherwise the group's watchdog detects an error and ends the process
        group.abort_hccl_comm("a peer of the weight sync has ended")

    def shareable_memory(self, size: int) -> DeviceMemory:
        # Up to torch_npu 2.10 it accepts no other setting, and resets three (csrc/core/npu/NPUAllocatorConfig.cpp: parseArgs).
        change = torch.npu.memory._set_allocator_settings
        with without_expandable_segments("PYTORCH_NPU_ALLOC_CONF", change, whole=False):
            return DeviceMemory(torch.empty(size, dtype=torch.uint8, device=self.device()), "_share_npu_")

    def shared_bucket_notice(self, environment: Mapping[str, str]) -> str | None:
        # torch_npu rejects the other two settings that are reset, max_split_size_mb and garbage_collection_threshold,
        # together with expandable segments.
        for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = environment.get(name, "")
            if EXPANDABLE_SEGMENTS.search(value) and "roundup_power2_divisions" in value:
                return (
                    f"trainers have {name}={value}, and the first shared bucket of weight_sync.transport=ipc resets its "
                    "roundup_power2_divisions: leave that setting out, or set weight_sync.transport=auto"
                )
        return None

    def open_shared(self, handle: dict[str, Any]) -> torch.Tensor:
        return open_device_memory(handle, self.device(), "_new_shared_npu")

    def profiler(self, directory: Path, name: str, options: TraceOptions) -> Profiler:
        from torch_npu import profiler

        activities = {"cpu": profiler.ProfilerActivity.CPU, "device": profiler.ProfilerActivity.NPU}
        traced: Profiler = profiler.profile(
            activities=[activity for content, activity in activities.items() if options.records(content)],
            record_shapes=options.records("shapes"),
            profile_memory=options.records("memory"),
            with_stack=options.records("stack"),
            with_modules=options.records("modules"),
            experimental_config=profiler._ExperimentalConfig(
                profiler_level=getattr(profiler.ProfilerLevel, (options.level or "level0").capitalize()),
                # torch_npu's default, PipeUtilization, is reset with a warning at level0.
                aic_metrics=getattr(profiler.AiCMetrics, options.metrics or "AiCoreNone"),
                export_type=getattr(profiler.ExportType, (options.export or "text").capitalize()),
                mstx=options.marks,
            ),
            on_trace_ready=profiler.tensorboard_trace_handler(
                str(directory), worker_name=name, analyse_flag=options.analysis
            ),
        )
        return traced


_GROUPS = itertools.count()

# Trainer and engine share a device when colocated: without ranges both bind HCCL's default port.
_MANY_PROCESSES = {ports.variable: ports.default for ports in NPU.port_ranges}
# With a rank table, torch_npu forms the default group of each process from it, whatever ranks it has. It ignores ""
# (ProcessGroupHCCL::createHCCLCommEx).
_MANY_GROUPS = {"RANK_TABLE_FILE": ""}


@contextlib.contextmanager
def _without_aliases() -> Iterator[None]:
    """Disable module-level `__getattr__` in transformers within the block.

    MindSpeed looks up every name that it patches in every loaded module. In transformers 5 a lookup in the alias modules of
    vision models (`models.X.image_processing_X_fast`) imports other modules, and fails without torchvision.
    """
    lazy = [
        (module, vars(module).pop("__getattr__"))
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.") and "__getattr__" in vars(module)
    ]
    try:
        yield
    finally:
        for module, function in lazy:
            module.__getattr__ = function  # type: ignore[method-assign]
