"""Device memory given back while the engines run (colocated placement)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megarl.megatron.optimizer import members


class Offloader:
    """Moves weights and optimizer states to the host and back; drops gradients, which are zeroed anyway.

    Storages are freed and filled again: the tensors, and all views that Megatron keeps of them, stay as
    they are. In between they have no memory behind them. The copies on the host are made once and filled at every
    hand-over: fresh memory would cost a page fault for every 4 KiB, and copies from it would go through a bounce buffer.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self._away: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes of a storage, their copy on the host
        self._hosts: dict[int, torch.Tensor] = {}  # memory on the host, by the storage that it is for
        self._gradients: list[tuple[torch.Tensor, int]] = []  # gradient buffer, bytes of its storage
        self._weights_away = False

    def offload_optimizer(self) -> None:
        """Free gradient buffers, moments and master weights: all but what the weights themselves need."""
        assert not self._gradients, "already offloaded"
        assert not self._weights_away, "the optimizer goes first: it may hold views of the weights"
        for buffer in self._gradient_buffers():
            storage = buffer.grad_data.untyped_storage()
            self._gradients.append((buffer.grad_data, storage.size()))
            storage.resize_(0)
        weights = {weight.untyped_storage().data_ptr() for weight in self._weights()}
        device = next(self._weights()).device  # states that are on the host (optimizer_cpu_offload) stay there
        # Where nothing is kept in higher precision, the optimizer's parameters are views of the weights.
        tensors = (tensor for tensor in self._optimizer_tensors() if tensor.device == device)
        self._move(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in weights)

    def offload_weights(self) -> None:
        """Free the weights. They are on the host until `onload`."""
        assert not self._weights_away, "already offloaded"
        self._weights_away = True
        self._move(self._weights())

    def onload(self) -> None:
        """Give everything that is away its memory and its contents back; gradients come back as zeros."""
        for whole, host in self._away:
            whole.untyped_storage().resize_(host.numel())
            whole.copy_(host)
        for gradient, size in self._gradients:
            gradient.untyped_storage().resize_(size)
            gradient.zero_()
        self._away, self._gradients, self._weights_away = [], [], False

    def _move(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0:  # a view of a storage that has been moved
                continue
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = self._hosts.get(storage._cdata)
            if host is None or host.numel() != whole.numel():
                host = self._hosts[storage._cdata] = host_memory(whole)
            self._away.append((whole, host.copy_(whole)))
            storage.resize_(0)

    def _gradient_buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _weights(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks:
            yield from (parameter.data for parameter in chunk.parameters())

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for member in members(self.optimizer):
            for state in member.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Memory on the host for a copy of `tensor`, page-locked where that makes copies from a device fast."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return host_memory(tensor).copy_(tensor)


def swap(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Exchange the contents of two lists, tensor by tensor, so that one more tensor on the device is all it takes."""
    for tensor, other in zip(tensors, others, strict=True):
        current = tensor.clone()
        tensor.copy_(other)
        other.copy_(current)
