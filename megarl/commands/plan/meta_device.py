"""An accelerator without memory, for planning: tensors have shapes and types, collectives move nothing.

A process that has prepared it is any rank of any layout, whatever the machine: it builds what that rank would hold, and
runs what that rank would run, in kilobytes. Everything that needs a value fails, but for what the host itself has sent
to the device (`_remember_what_is_sent`). Patches are process-wide, as the CPU's: it is for a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megarl.platform.base import Platform
from megarl.platform.cpu import stand_in
from megarl.platform.device_kind import DeviceKind

META = torch.device("meta")
_FEW = 2**16  # numbers of a tensor that are remembered: offsets and counts, not activations


class MetaPlatform(Platform):
    """torch's "meta" device in the place of an accelerator, with megarl's own layers (`native_layers.py`)."""

    kind = DeviceKind(
        name="meta",
        plural="tensors without memory",
        implementation="megarl.commands.plan.meta_device:MetaPlatform",
        sets=(),
        collective="fake",
    )
    process_group_backend = "fake"
    can_offload = True
    holds_values = False

    @property
    def uses_native_layers(self) -> bool:
        return True

    def prepare(self) -> None:
        if getattr(torch, "_megarl_meta", False):
            return
        self._assert_before_megatron()
        torch._megarl_meta = True
        stand_in(META)
        fake_collectives()
        _remember_what_is_sent()
        F.scaled_dot_product_attention = _attention
        F.rms_norm = _rms_norm

    def set_device(self, local_rank: int) -> None:
        """Nothing to choose."""

    def device(self) -> torch.device:
        return META

    def device_name(self) -> str:
        return "meta"

    def collective(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        raise NotImplementedError("tensors without memory have nothing to send")

    def shareable_memory(self, size: int) -> Any:
        raise NotImplementedError("tensors without memory have nothing to share")

    def open_shared(self, handle: dict[str, Any]) -> Any:
        raise NotImplementedError("tensors without memory have nothing to share")

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def peak_memory(self) -> float:
        return 0.0


def join(rank: int, world_size: int) -> None:
    """Be rank `rank` of `world_size` processes, of which there are no others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def fake_collectives() -> None:
    """Every group is a fake one, Megatron's gloo groups too. What ranks exchange in a batch they exchange one by one:
    torch's batches ask for a device that communicates."""
    distributed = torch.distributed
    new_group = distributed.new_group

    @functools.wraps(new_group)
    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake", "pg_options": None})

    @contextlib.contextmanager
    def one_by_one(*_: Any, **__: Any) -> Iterator[_Work]:
        yield _Work()

    distributed.new_group = fake_group
    distributed._coalescing_manager = one_by_one
    distributed.batch_isend_irecv = lambda batch: [one.op(one.tensor, one.peer, one.group) for one in batch]


class _Work:
    """A collective that is always complete."""

    def wait(self) -> None:
        """Nothing is under way."""


def _remember_what_is_sent() -> None:
    """Let `tolist` and `item` answer for tensors that came from the host and that nothing was computed of: offsets of
    sequences, counts. A sum over ranks is then the rank's own part."""
    to, make, tolist, item = torch.Tensor.to, torch.tensor, torch.Tensor.tolist, torch.Tensor.item

    def remembering_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sent = to(self, *args, **kwargs)
        if sent.device == META and self.device.type == "cpu" and self.numel() <= _FEW:
            sent._on_host = self
        return sent

    @functools.wraps(make)
    def remembering_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(data, *args, **kwargs)
        if made.device == META:
            made._on_host = make(data, *args, **{**kwargs, "device": "cpu"})
        return made

    torch.Tensor.to = remembering_to
    torch.tensor = remembering_tensor
    torch.Tensor.tolist = lambda self: tolist(getattr(self, "_on_host", self))
    torch.Tensor.item = lambda self: item(getattr(self, "_on_host", self))


_ONLY_VALUES = (  # operations that tell values, or whose output has a size that hangs on them
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.unique_consecutive.default,
)


class KnownValues(TorchDispatchMode):
    """Computes on the host, too, what is computed of the few numbers that the host has sent: where an image's windows lie
    follows from its size by some arithmetic on the device, and shapes follow from that.

    Only within it, since it looks at every operation.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        known = any(hasattr(tensor, "_on_host") for tensor in tensors) and all(
            tensor.device != META or hasattr(tensor, "_on_host") for tensor in tensors
        )
        if not known:
            return function(*args, **kwargs)
        on_host = function(*tree_map(_host, args), **tree_map(_host, kwargs))
        if function == torch.ops.aten._local_scalar_dense.default or kwargs.get("device", META) != META:
            return on_host  # which the host is told
        by_value = function in _ONLY_VALUES
        result = tree_map(lambda value: value.to(META), on_host) if by_value else function(*args, **kwargs)
        for made, value in zip(tree_leaves(result), tree_leaves(on_host), strict=True):
            made._on_host = value
        return result


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return getattr(value, "_on_host", value)
    return torch.device("cpu") if value == META else value


# --- kernels that every accelerator has as one, and that torch takes apart on "meta" ---------------------------


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # kernels add a mask, and torch makes such a one
        attn_mask = query.new_empty(attn_mask.shape)
    return _Attention.apply(query, key, value, attn_mask)


class _Attention(torch.autograd.Function):
    """Flash attention's memory: no matrix of queries by keys but a mask; the output and a number a row stay for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        of_rows = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, of_rows, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return _RMSNorm.apply(input, weight)


class _RMSNorm(torch.autograd.Function):
    """The fused kernel's memory: a number a row stays beside the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
