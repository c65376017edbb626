"""An accelerator without memory, for planning: tensors have shapes and types, collectives move nothing.

A prepared process can be any rank of any layout on any machine: it builds that rank's model and runs its passes in kilobytes.
Operations that need a value fail, except for values that the host sent to the device (`_remember_sent_values`). Patches are
process-wide, as for the CPU, so use a separate process.
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
_FEW = 2**16  # largest tensor with remembered values: offsets and counts, not activations


class MetaPlatform(Platform):
    """torch's "meta" device as an accelerator, with megarl's native layers (`megatron/native_layers/`)."""

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
        _remember_sent_values()
        F.scaled_dot_product_attention = _attention
        F.rms_norm = rms_norm

    def set_device(self, local_rank: int) -> None:
        """Do nothing: there is one device."""

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
        """Do nothing: no memory is cached."""

    def peak_memory(self) -> float:
        return 0.0


def join(rank: int, world_size: int) -> None:
    """Become rank `rank` of `world_size` processes; the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def fake_collectives() -> None:
    """Make every group a fake one, also Megatron's gloo groups. Batches of sends and receives run one by one, since torch's
    batches need a device with collectives."""
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
    distributed.batch_isend_irecv = lambda batch: [call.op(call.tensor, call.peer, call.group) for call in batch]


class _Work:
    """A collective that is always complete."""

    def wait(self) -> None:
        """Return at once."""


def _remember_sent_values() -> None:
    """Patch `tolist` and `item` to work on tensors that came unchanged from the host, such as sequence offsets and counts.
    A sum over ranks is then this rank's part."""
    to, make, tolist, item = torch.Tensor.to, torch.tensor, torch.Tensor.tolist, torch.Tensor.item

    def remembering_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sent = to(self, *args, **kwargs)
        if sent.device == META and self.device.type == "cpu" and self.numel() <= _FEW:
            sent._on_host = self
        return sent

    @functools.wraps(make)
    def remembering_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(data, *args, **kwargs)
        if tensor.device == META:
            tensor._on_host = make(data, *args, **{**kwargs, "device": "cpu"})
        return tensor

    torch.Tensor.to = remembering_to
    torch.tensor = remembering_tensor
    torch.Tensor.tolist = lambda self: tolist(getattr(self, "_on_host", self))
    torch.Tensor.item = lambda self: item(getattr(self, "_on_host", self))


_ONLY_VALUES = (  # operations that return values, or with an output size that depends on values
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.unique_consecutive.default,
)


class KnownValues(TorchDispatchMode):
    """Computes on the host as well whatever depends only on values that the host sent. An image's windows follow from its
    size by arithmetic on the device, and shapes follow from the windows.

    Slow, since it intercepts every operation: use it only where needed.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        has_values = any(hasattr(tensor, "_on_host") for tensor in tensors) and all(
            tensor.device != META or hasattr(tensor, "_on_host") for tensor in tensors
        )
        if has_values and function.namespace == "c10d":
            for tensor in tensors:  # other ranks' values are not known
                vars(tensor).pop("_on_host", None)
            has_values = False
        if not has_values:
            return function(*args, **kwargs)
        on_host = function(*tree_map(_host, args), **tree_map(_host, kwargs))
        if function == torch.ops.aten._local_scalar_dense.default or kwargs.get("device", META) != META:
            return on_host  # the host reads this value
        by_value = function in _ONLY_VALUES
        result = tree_map(lambda value: value.to(META), on_host) if by_value else function(*args, **kwargs)
        for output, value in zip(tree_leaves(result), tree_leaves(on_host), strict=True):
            output._on_host = value
        return result


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return getattr(value, "_on_host", value)
    return torch.device("cpu") if value == META else value


# --- kernels that are fused on every accelerator, and that torch decomposes on "meta" ---------------------------


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
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # kernels add a mask of the query's type
        attn_mask = query.new_empty(attn_mask.shape)
    return _Attention.apply(query, key, value, attn_mask)


class _Attention(torch.autograd.Function):
    """Memory of flash attention: no matrix of queries by keys except a mask; the output and one number per row are saved for
    the backward pass."""

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


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return _RMSNorm.apply(input, weight)


class _RMSNorm(torch.autograd.Function):
    """Memory of a fused RMSNorm, with or without a weight: one number per row is saved besides the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
