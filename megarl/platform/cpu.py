"""The CPU as a device: Megatron and gloo on cores.

Megatron names its accelerator ``torch.cuda`` and ``"cuda"``. Where there is none, `stand_in` gives these names
another device's meaning, in this process and before Megatron is imported: what torch_npu's ``transfer_to_npu`` does
for Ascend. Each function below is one such name, with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.utils._device

from megarl.platform import cpu_kind
from megarl.platform.base import Platform
from megarl.platform.ipc import HostMemory, open_host_memory

CPU = torch.device("cpu")

# Megatron compiles small functions with torch.compile, which would call a C++ compiler at run time.
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


class CPUPlatform(Platform):
    """CPU cores with gloo: the same code path as on accelerators, at a small scale."""

    kind = cpu_kind.CPU
    process_group_backend = "gloo"
    can_offload = False

    @property
    def uses_native_layers(self) -> bool:
        return True

    def prepare(self) -> None:
        if getattr(torch, "_megarl_cpu", False):
            return
        self._assert_before_megatron()
        torch._megarl_cpu = True
        stand_in(CPU)
        _unequal_parts()

    def trainer_env(self, timeout: float) -> dict[str, str]:
        return _ENVIRONMENT

    def set_device(self, local_rank: int) -> None:
        """Nothing to choose: every process computes on the machine's cores."""

    def device(self) -> torch.device:
        return CPU

    def device_name(self) -> str:
        return "cpu"

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def collective(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        import torch.distributed as dist

        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def shareable_memory(self, size: int) -> HostMemory:
        return HostMemory(size)

    def open_shared(self, handle: dict[str, Any]) -> torch.Tensor:
        return open_host_memory(handle)

    def peak_memory(self) -> float:
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def stand_in(device: torch.device) -> None:
    """Let `device`, "cpu" or "meta", answer for what Megatron calls CUDA."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _device_queries(device)
    _streams()
    _random_states(device)
    _factories(device)
    _moves(device)
    _type_names()
    _split_sizes()
    _expected_warnings()


def _give(owner: Any, names: str, result: Any = None) -> None:
    """Make each of `names` a function that returns `result`. One function object a name: torch._dynamo
    keeps a table from functions to rules and refuses an object that stands under two names."""
    for name in names.split():
        setattr(owner, name, lambda *_, _result=result, **__: _result)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _device_queries(device: torch.device) -> None:
    """Megatron passes `torch.cuda.current_device()` straight on as ``device=``: a device, not a number."""
    _give(torch.cuda, "current_device", device)
    _give(torch.cuda, "device_count", 0)
    _give(torch.cuda, "set_device synchronize empty_cache reset_peak_memory_stats _lazy_init")
    _give(torch.cuda, "memory_allocated max_memory_allocated memory_reserved", 0)


class _Stream:
    """A stream whose work is always complete; waits and records do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., _Event]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class _Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


def _streams() -> None:
    """Gradient buckets, the MoE dispatcher and shared experts use side streams."""
    cuda = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    _give(cuda, "current_stream default_stream", _Stream())
    cuda.stream = lambda _=None: contextlib.nullcontext()
    _give(torch.Tensor, "record_stream")
    _give(cuda.nvtx, "range_push range_pop")
    cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()


def _random_states(device: torch.device) -> None:
    """Megatron's tracker of random states works on CUDA generators: here on the one CPU generator."""
    cuda = torch.cuda
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda device=None: torch.get_rng_state()
        owner.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.default_generators = {device: torch.default_generator}
    # Without a GPU torch would queue this call until CUDA starts, that is, for ever and without a word.
    cuda._lazy_call = lambda function, **_: function()


_FACTORIES = (
    "tensor as_tensor zeros ones empty full arange rand randn randint randperm eye "
    "empty_like zeros_like ones_like full_like rand_like randn_like"
)


def _factories(stand: torch.device) -> None:
    """``device="cuda"`` stands as a literal in many calls; and there is no pinned memory."""

    def on_stand_in(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs:
                kwargs.pop("pin_memory", None)
                if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
                    kwargs["device"] = stand
            return function(*args, **kwargs)

        return wrapped

    # torch caches the set of factories at first use; it must hold the originals or
    # ``with torch.device("meta")`` no longer recognises them.
    torch.utils._device._device_constructors()
    for name in _FACTORIES.split():
        setattr(torch, name, on_stand_in(getattr(torch, name)))


def _moves(stand: torch.device) -> None:
    """``.cuda()`` and ``.to("cuda")`` lead to the stand-in, ``.pin_memory()`` nowhere."""
    tensor_to = torch.Tensor.to
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.cuda = lambda self, *_, **__: tensor_to(self, stand)
    torch.nn.Module.cuda = lambda self, *_, **__: self  # modules are built where they are to be

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.Tensor, torch.dtype)) and _is_cuda(args[0]):
            args = (stand, *args[1:])
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = stand
        return tensor_to(self, *args, **kwargs)

    torch.Tensor.to = to


def _type_names() -> None:
    """Megatron's optimizers sort parameters by `Tensor.type()`, compared with 'torch.cuda.FloatTensor'."""
    tensor_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        if args or kwargs or self.device.type not in ("cpu", "meta"):
            return result
        return f"torch.cuda.{result.rsplit('.', 1)[1]}"

    torch.Tensor.type = type_


def _split_sizes() -> None:
    """The MoE dispatcher turns split sizes into lists only where they are CUDA tensors."""
    exchange = torch.distributed.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Any = None,
        input_splits: Any = None,
        *args: Any,
        **kw: Any,
    ) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            kw[name] = as_list(kw.get(name, output_splits if name.startswith("output") else input_splits))
        return exchange(output, input, kw.pop("output_split_sizes"), kw.pop("input_split_sizes"), *args, **kw)

    torch.distributed.all_to_all_single = all_to_all_single


def _unequal_parts() -> None:
    """Gathering and scattering parts of different sizes, which NCCL and HCCL can and gloo refuses.

    Expert parallel with expert-tensor parallel does it: ranks that share an expert got different numbers of
    tokens for it. Each part travels by itself, as it does in NCCL.
    """
    distributed = torch.distributed
    gather, scatter = distributed.all_gather, distributed.reduce_scatter

    def equal(parts: list[torch.Tensor]) -> bool:
        return all(part.shape == parts[0].shape for part in parts)

    @functools.wraps(gather)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or equal(tensor_list):
            return gather(tensor_list, tensor, group, async_op)
        tensor_list[distributed.get_rank(group)].copy_(tensor)
        for owner, part in zip(distributed.get_process_group_ranks(group), tensor_list, strict=True):
            if part.numel():
                distributed.broadcast(part, owner, group)
        return None

    @functools.wraps(scatter)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or equal(input_list):
            return scatter(output, input_list, op, group, async_op)
        sums = [part.clone() for part in input_list]  # what a sum leaves on ranks that it is not for is undefined
        for owner, part in zip(distributed.get_process_group_ranks(group), sums, strict=True):
            if part.numel():
                distributed.reduce(part, owner, op, group)
        output.copy_(sums[distributed.get_rank(group)])
        return None

    distributed.all_gather, distributed.reduce_scatter = all_gather, reduce_scatter


_EXPECTED_WARNINGS = (
    # Both are CUDA extensions: megarl/megatron/native_layers.py and adam.py stand in for them.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "If you are using transformer_engine as the transformer implementation, the core_attn is from",
    # Megatron's own calls, of names that torch is about to retire.
    r"`torch\.distributed\.\w+` is deprecated",
    "`load_state_dict` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    # Megatron's distributed optimizer asks shards, which are views, for a gradient; they have none.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # Megatron's own default, and its advice for CUDA.
    "full scope is deprecated. Use empty cuda_graph_scope",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
)


def _expected_warnings() -> None:
    """Leave out what Megatron says in every run on a CPU and nobody can act on; any other warning is shown."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # One generator plays both the CPU's and CUDA's part.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
