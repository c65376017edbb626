"""Bytes of the tensors that operations make, counted while they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Enough(Exception):
    """What was to be seen has been."""


class Live(TorchDispatchMode):
    """Counts the memory of `device` that was made since it was entered and still lives, and the most of it at a time.

    Each memory counts once, whatever views there are of it, and until its last view is gone. What existed before does
    not count. What a kernel takes for itself while it runs, no mode can see.

    `kept` is the most there was when a backward pass began: what forward passes have kept for it.
    `wide`: of `peak`, the tensors whose last dimension is `width`.
    `stand_ins`: functions in the place of operations that cannot run without values.
    `backwards`: leave the block, quietly, where so many backward passes are over.
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
        return False  # nothing is compiled here, and the guard against it costs as much as an operation

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
        given: set[int] | None = None
        for tensor in self._tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                if given is None:
                    tensors = self._tensors((*args, *(kwargs or {}).values()))
                    given = {one.untyped_storage()._cdata for one in tensors}
                if storage._cdata not in given:
                    self._add(storage, wide=tensor.dim() > 0 and tensor.shape[-1] == self.width)
        return result

    def _tensors(self, values: Iterable[Any]) -> Iterator[torch.Tensor]:
        """On the device, in lists too. (torch's own walk through arguments takes longer than the operations.)"""
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
