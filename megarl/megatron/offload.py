"""Offload device memory of the trainer while the engines run (colocated placement)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megarl.megatron.optimizer import members


class Offloader:
    """Moves weights and optimizer states to the host and back; frees gradients, which are zeroed before use.

    Storages are freed and refilled in place: the tensors, and all of Megatron's views of them, stay valid, but have no
    memory in between. Host copies are allocated once and reused: fresh memory would cost a page fault per 4 KiB, and
    copies from pageable memory go through a bounce buffer.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self._away: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes of a storage, their copy on the host
        self._hosts: dict[int, torch.Tensor] = {}  # host memory by storage
        self._gradients: list[tuple[torch.Tensor, int]] = []  # gradient buffer, bytes of its storage
        self._weights_away = False

    def offload_optimizer(self) -> None:
        """Free gradient buffers, moments and master weights; weights stay on the device."""
        assert not self._gradients, "already offloaded"
        assert not self._weights_away, "offload the optimizer first: it may hold views of the weights"
        for buffer in self._gradient_buffers():
            storage = buffer.grad_data.untyped_storage()
            self._gradients.append((buffer.grad_data, storage.size()))
            storage.resize_(0)
        weights = {weight.untyped_storage().data_ptr() for weight in self._weights()}
        device = next(self._weights()).device  # states that are on the host (optimizer_cpu_offload) stay there
        # Without master weights, the optimizer's parameters are views of the weights.
        tensors = (tensor for tensor in self._optimizer_tensors() if tensor.device == device)
        self._move(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in weights)

    def offload_weights(self) -> None:
        """Move the weights to the host until `onload`."""
        assert not self._weights_away, "already offloaded"
        self._weights_away = True
        self._move(self._weights())

    def onload(self) -> None:
        """Restore all offloaded memory and contents; gradients come back as zeros."""
        for storage_bytes, host in self._away:
            storage_bytes.untyped_storage().resize_(host.numel())
            storage_bytes.copy_(host)
        for gradient, size in self._gradients:
            gradient.untyped_storage().resize_(size)
            gradient.zero_()
        self._away, self._gradients, self._weights_away = [], [], False

    def _move(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0:  # a view of a storage that has been moved
                continue
            storage_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = self._hosts.get(storage._cdata)
            if host is None or host.numel() != storage_bytes.numel():
                host = self._hosts[storage._cdata] = host_memory(storage_bytes)
            self._away.append((storage_bytes, host.copy_(storage_bytes)))
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
    """Allocate host memory for a copy of `tensor`, page-locked if the tensor is on a device (fast copies)."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return host_memory(tensor).copy_(tensor)


def swap(tensors: list[torch.Tensor], swapped: list[torch.Tensor]) -> None:
    """Exchange the contents of two lists one tensor at a time, so the device needs room for one more tensor only."""
    for tensor, other in zip(tensors, swapped, strict=True):
        current = tensor.clone()
        tensor.copy_(other)
        other.copy_(current)
