"""CPU platform: Megatron and gloo on CPU cores.

Megatron uses the names ``torch.cuda`` and ``"cuda"`` for its accelerator. Without CUDA, `stand_in` redirects these names to
another device, in this process and before Megatron is imported, as torch_npu's ``transfer_to_npu`` does for Ascend.
Each function below patches one group of names and states the reason.
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
from typing import TYPE_CHECKING, Any

from megarl.platform import cpu_kind
from megarl.platform.base import Platform
from megarl.platform.installed import LateModule
from megarl.platform.ipc import HostMemory, open_host_memory

if TYPE_CHECKING:
    import torch
else:  # the controller needs this platform, and no torch
    torch = LateModule("torch")

# Megatron and vLLM compile small functions with torch.compile, which calls a C++ compiler: seconds at each first use.
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


class CPUPlatform(Platform):
    """CPU cores with gloo: the code path of accelerators at a small scale."""

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
        stand_in(torch.device("cpu"))
        _unequal_parts()

    def trainer_env(self, timeout: float) -> dict[str, str]:
        return _ENVIRONMENT

    def rollout_env(self) -> dict[str, str]:
        return _ENVIRONMENT

    def set_device(self, local_rank: int) -> None:
        """Do nothing: every process computes on the machine's cores."""

    def device(self) -> torch.device:
        return torch.device("cpu")

    def device_name(self) -> str:
        return "cpu"

    def empty_cache(self) -> None:
        """Do nothing: torch does not cache CPU memory."""

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
    """Redirect Megatron's CUDA calls to `device`, "cpu" or "meta"."""
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
    """Replace each of `names` by a function that returns `result`.

    Each name gets a separate function object: torch._dynamo maps functions to rules and rejects a function with two names.
    """
    for name in names.split():
        setattr(owner, name, lambda *_, _result=result, **__: _result)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _device_queries(device: torch.device) -> None:
    """Patch device queries. Megatron passes `torch.cuda.current_device()` as ``device=``, so it returns a device."""
    _give(torch.cuda, "current_device", device)
    _give(torch.cuda, "device_count", 0)
    _give(torch.cuda, "set_device synchronize empty_cache reset_peak_memory_stats _lazy_init")
    _give(torch.cuda, "memory_allocated max_memory_allocated memory_reserved", 0)


class _Stream:
    """A stream on which all work is complete; waits and records do nothing."""

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
    """An event that is always complete."""

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
    """Patch streams and events, which gradient buckets, the MoE dispatcher and shared experts use."""
    cuda = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    _give(cuda, "current_stream default_stream", _Stream())
    cuda.stream = lambda _=None: contextlib.nullcontext()
    _give(torch.Tensor, "record_stream")
    _give(cuda.nvtx, "range_push range_pop")
    cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()


def _random_states(device: torch.device) -> None:
    """Redirect the CUDA generators of Megatron's random state tracker to the CPU generator."""
    cuda = torch.cuda
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda device=None: torch.get_rng_state()
        owner.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.default_generators = {device: torch.default_generator}
    # Without a GPU torch would queue this call until CUDA is initialized, which never happens.
    cuda._lazy_call = lambda function, **_: function()


_FACTORIES = (
    "tensor as_tensor zeros ones empty full arange rand randn randint randperm eye "
    "empty_like zeros_like ones_like full_like rand_like randn_like"
)


def _factories(stand: torch.device) -> None:
    """Redirect ``device="cuda"``, a literal in many calls, and drop ``pin_memory``, which needs an accelerator."""

    def on_stand_in(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs:
                kwargs.pop("pin_memory", None)
                if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
                    kwargs["device"] = stand
            return function(*args, **kwargs)

        return wrapped

    # torch caches the set of factories at first use. The cache must contain the original functions, or
    # ``with torch.device("meta")`` does not recognize them.
    from torch.utils import _device

    _device._device_constructors()
    for name in _FACTORIES.split():
        setattr(torch, name, on_stand_in(getattr(torch, name)))


def _moves(stand: torch.device) -> None:
    """Redirect ``.cuda()`` and ``.to("cuda")`` to the stand-in; ``.pin_memory()`` returns the tensor itself."""
    tensor_to = torch.Tensor.to
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.cuda = lambda self, *_, **__: tensor_to(self, stand)
    torch.nn.Module.cuda = lambda self, *_, **__: self  # modules are built on their final device

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.Tensor, torch.dtype)) and _is_cuda(args[0]):
            args = (stand, *args[1:])
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = stand
        return tensor_to(self, *args, **kwargs)

    torch.Tensor.to = to


def _type_names() -> None:
    """Return CUDA type names: Megatron's optimizers compare `Tensor.type()` with 'torch.cuda.FloatTensor'."""
    tensor_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        if args or kwargs or self.device.type not in ("cpu", "meta"):
            return result
        return f"torch.cuda.{result.rsplit('.', 1)[1]}"

    torch.Tensor.type = type_


def _split_sizes() -> None:
    """Convert split sizes to lists: the MoE dispatcher does so only for CUDA tensors."""
    original = torch.distributed.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
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
        return original(output, input, kw.pop("output_split_sizes"), kw.pop("input_split_sizes"), *args, **kw)

    torch.distributed.all_to_all_single = all_to_all_single


def _unequal_parts() -> None:
    """Support all_gather and reduce_scatter of parts of different sizes, which gloo rejects and NCCL and HCCL support.

    Expert parallelism with expert tensor parallelism needs it: ranks that share an expert have different numbers of
    tokens for it. Each part is sent in a separate collective, as in NCCL.
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
        sums = [part.clone() for part in input_list]  # reduce leaves undefined values on other ranks
        for owner, part in zip(distributed.get_process_group_ranks(group), sums, strict=True):
            if part.numel():
                distributed.reduce(part, owner, op, group)
        output.copy_(sums[distributed.get_rank(group)])
        return None

    distributed.all_gather, distributed.reduce_scatter = all_gather, reduce_scatter


_EXPECTED_WARNINGS = (
    # Both are CUDA extensions, replaced by megarl/megatron/native_layers/ and adam.py.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "If you are using transformer_engine as the transformer implementation, the core_attn is from",
    # Megatron's calls of deprecated torch functions.
    r"`torch\.distributed\.\w+` is deprecated",
    "`load_state_dict` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    # Megatron's distributed optimizer reads the gradient of shards, which are views without one.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # Megatron's default, and advice for CUDA.
    "full scope is deprecated. Use empty cuda_graph_scope",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "When using async grad allreduce it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
)


def _expected_warnings() -> None:
    """Suppress Megatron's warnings that appear in every CPU run and need no action; all others are shown."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # The CPU generator also serves as CUDA's.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
