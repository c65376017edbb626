"""Counter of the tensor memory that operations allocate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Enough(Exception):
    """Ends the block: all backward passes to be observed are done."""


class MemoryCounter(TorchDispatchMode):
    """Counts the memory on `device` that operations allocate inside the block: current bytes and peak.

    Each storage counts once, from its creation until its last view is gone. Earlier storages do not count, and a kernel's
    workspace is invisible to a dispatch mode.

    `kept`: maximum at the begin of a backward pass: memory that forward passes saved for it.
    `wide`: part of `peak` in tensors with a last dimension of `width`.
    `stand_ins`: replacements of operations that cannot run without values.
    `backwards`: leave the block quietly after this many backward passes.
    """

    def __init__(
        self,
        device: torch.device,
        stand_ins: dict[Any, Callable[..., torch.Tensor]] | None = None,
        *,
        backwards: int | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.device, self.stand_ins, self.left = device.type, stand_ins or {}, backwards
        self.now = self.peak = self.kept = 0
        self.width, self.wide, self._wide_now = width, 0, 0
        self._in_backward = False
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard costs as much as an operation

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        super().__exit__(kind, error, trace)
        return kind is _Enough

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._in_backward:
            self.kept = max(self.kept, self.now)
        if self.left is not None and self._in_backward and not in_backward:
            self.left -= 1
            if not self.left:
                raise _Enough
        self._in_backward = in_backward
        result = self.stand_ins.get(function, function)(*args, **(kwargs or {}))
        inputs: set[int] | None = None
        for tensor in self._tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                if inputs is None:
                    tensors = self._tensors((*args, *(kwargs or {}).values()))
                    inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
                if storage._cdata not in inputs:
                    self._add(storage, wide=tensor.dim() > 0 and tensor.shape[-1] == self.width)
        return result

    def _tensors(self, values: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors on the device, also in lists. (torch's tree functions take longer than the operations.)"""
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.device.type == self.device:
                    yield value
            elif isinstance(value, (list, tuple)):
                yield from self._tensors(value)

    def _add(self, storage: torch.UntypedStorage, *, wide: bool) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            del self._seen[key]
            self.now -= size
            self._wide_now -= size if wide else 0

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self._wide_now += size if wide else 0
        if self.now > self.peak:
            self.peak, self.wide = self.now, self._wide_now
