"""Device memory given back while the engines run (colocated placement)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megarl.megatron.optimizer import members


class Offloader:
    """Moves weights and optimizer states to the host and back; drops gradients, which are zeroed anyway."""

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self.away: list[tuple[torch.Tensor, torch.Tensor]] = []  # device tensor, its host copy
        self.gradients: list[tuple[torch.Tensor, int]] = []  # device tensor, bytes of its storage

    def offload(self) -> None:
        """Free the device storage of everything; the tensors stay, without memory behind them."""
        assert not self.away and not self.gradients, "already offloaded"
        for buffer in self._buffers():
            self._drop(buffer.grad_data)
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.size() == 0:  # a view of a storage that has been moved
                continue
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.away.append((whole, whole.to("cpu")))
            storage.resize_(0)

    def onload(self) -> None:
        """Give everything its memory and its contents back; gradients come back as zeros."""
        for whole, host in self.away:
            whole.untyped_storage().resize_(host.numel())
            whole.copy_(host)
        for gradient, size in self.gradients:
            gradient.untyped_storage().resize_(size)
            gradient.zero_()
        self.away, self.gradients = [], []

    def _drop(self, gradient: torch.Tensor) -> None:
        storage = gradient.untyped_storage()
        self.gradients.append((gradient, storage.size()))
        storage.resize_(0)

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks:
            yield from (parameter.data for parameter in chunk.parameters())
        for group in self.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])  # master weights, or views of weights
        for member in members(self.optimizer):
            for state in member.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
