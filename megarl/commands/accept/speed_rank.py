"""A rank that times single operations of its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megarl.commands.accept.rank import Rank

REPEATS = 20


class SpeedRank(Rank):
    """A rank of the speed stage. Each method returns the seconds of `REPEATS` runs after a warm-up run."""

    def matmul(self, size: int) -> list[float]:
        """Time a product of two square bfloat16 matrices."""
        a = torch.ones(size, size, device=self.platform.device(), dtype=torch.bfloat16)
        b = a.clone()
        return self._timed(lambda: a @ b)

    def copy(self, elements: int) -> list[float]:
        """Time a copy within the device's memory, float32."""
        source = torch.ones(elements, device=self.platform.device())
        target = torch.empty_like(source)
        return self._timed(lambda: target.copy_(source))

    def to_device(self, elements: int) -> list[float]:
        """Time a copy from page-locked host memory, float32, on all ranks at once."""
        from megarl.megatron.offload import host_memory

        target = torch.empty(elements, device=self.platform.device())
        source = host_memory(target).fill_(1.0)
        torch.distributed.barrier()
        return self._timed(lambda: target.copy_(source, non_blocking=True))

    def adam(self, elements: int) -> list[float]:
        """Time a step of Megatron's optimizer on float32 weights, gradients and moments."""
        import megatron.core.optimizer as optimizers

        if self.platform.uses_native_layers:
            from megarl.megatron.native_layers import spec_provider

            spec_provider.install()
        weight = torch.nn.Parameter(torch.ones(elements, device=self.platform.device()))
        weight.grad = torch.ones_like(weight)
        optimizer = optimizers.Adam([weight], lr=1e-4)
        return self._timed(optimizer.step)

    def send(self, elements: int) -> list[float] | None:
        """Rank 0 to rank 1, measured by both. None on the other ranks."""
        if self.rank > 1:
            return None
        tensor = torch.ones(elements, device=self.platform.device())
        return self._timed(lambda: dist.send(tensor, 1) if self.rank == 0 else dist.recv(tensor, 0))

    def gather(self, elements: int) -> list[float]:
        """Time an all-gather of `elements` float32 in total over all ranks."""
        part = torch.ones(elements // self.world_size, device=self.platform.device())
        gathered = torch.empty(part.numel() * self.world_size, device=self.platform.device())
        return self._timed(lambda: dist.all_gather_into_tensor(gathered, part))

    def _timed(self, operation: Callable[[], Any]) -> list[float]:
        operation()
        seconds = []
        for _ in range(REPEATS):
            self.platform.synchronize()
            began = time.perf_counter()
            operation()
            self.platform.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds
