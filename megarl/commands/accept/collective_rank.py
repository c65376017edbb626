"""A rank that runs the collectives of every group of a layout, and measures results, seconds, launches and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.commands.accept.rank import Rank
from megarl.recipe.trainers import MegatronConfig

REPEATS = 5
GROUPS = {
    "tensor": "get_tensor_model_parallel_group",
    "pipeline": "get_pipeline_model_parallel_group",
    "context": "get_context_parallel_group",
    "data": "get_data_parallel_group",
    "expert": "get_expert_model_parallel_group",
    "expert tensor": "get_expert_tensor_parallel_group",
    "expert data": "get_expert_data_parallel_group",
}


@dataclass(frozen=True)
class Timing:
    """One collective in one group, measured by one rank.

    seconds: time until completion. launch: time until the call returned. right: the result was correct. bytes: bytes
    that a rank sends or receives in a ring algorithm.
    """

    group: str
    collective: str
    ranks: tuple[int, ...]
    seconds: float
    launch: float
    bytes: float
    right: bool


@dataclass(frozen=True)
class Operation:
    """One collective, ready to run. `call` starts it and returns its handle or handles.

    share: bytes that a rank sends or receives, as a share of the tensor's bytes. `output` must equal `expected` afterwards.
    """

    name: str
    call: Callable[[], Any]
    share: float
    output: Any
    expected: Any


class CollectiveRank(Rank):
    """A rank of the collectives stage. All ranks call each method together."""

    def lay_out(self, megatron: MegatronConfig, timeout: float) -> dict[str, tuple[int, ...]]:
        """Create the groups as a trainer does. Return the ranks of each group of this rank."""
        from megatron.core import parallel_state

        from megarl.megatron.model.build import initialize_parallel

        initialize_parallel(megatron, timeout)
        self.groups = {"all": dist.group.WORLD}
        for name, getter in GROUPS.items():
            group = getattr(parallel_state, getter)()
            if dist.get_world_size(group) > 1:
                self.groups[name] = group
        return {name: tuple(dist.get_process_group_ranks(group)) for name, group in self.groups.items()}

    def memory(self) -> float | None:
        """Empty torch's cache and return the free device memory in GiB, or None on a CPU."""
        self.platform.empty_cache()
        return self.platform.free_memory()

    def collectives(self, name: str, elements: int) -> list[Timing]:
        """Time every collective in the group `name`, on float32 tensors of `elements`, on all its ranks at once."""
        group = self.groups.get(name)
        if group is None:
            dist.barrier()
            return []
        elements -= elements % dist.get_world_size(group) ** 2
        make = (self._all_reduce, self._gather, self._all_to_all, self._p2p)
        results = [self._timed(name, group, collective(group, elements), elements) for collective in make]
        dist.barrier()
        return results

    def _timed(self, name: str, group: Any, operation: Operation, elements: int) -> Timing:
        """Run `operation` REPEATS times and return the medians."""
        seconds, launches = [], []
        for _ in range(REPEATS):
            dist.barrier(group=group)
            self.platform.synchronize()
            began = time.perf_counter()
            work = operation.call()
            launched = time.perf_counter()
            for handle in work if isinstance(work, list) else [work]:
                handle.wait()
            self.platform.synchronize()
            seconds.append(time.perf_counter() - began)
            launches.append(launched - began)
        ranks = tuple(dist.get_process_group_ranks(group))
        medians = statistics.median(seconds), statistics.median(launches)
        sent = 4 * elements * operation.share
        return Timing(name, operation.name, ranks, *medians, sent, bool((operation.output == operation.expected).all()))

    def _ramp(self, length: int) -> Any:
        """Return [length] float32 with 0 to 250, repeated, so that sums over ranks are exact."""
        return torch.arange(length, device=self.platform.device(), dtype=torch.float32) % 251

    def _all_reduce(self, group: Any, elements: int) -> Operation:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        ramp = self._ramp(elements // size)
        whole = torch.empty(size, elements // size, device=ramp.device)

        def call() -> Any:
            whole.copy_(ramp).add_(rank)
            return dist.all_reduce(whole, group=group, async_op=True)

        expected = ramp * size + size * (size - 1) / 2
        return Operation("all_reduce", call, 2 * (size - 1) / size, whole, expected)

    def _gather(self, group: Any, elements: int) -> Operation:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        ramp = self._ramp(elements // size)
        part, gathered = ramp + rank, torch.empty(elements, device=ramp.device)
        expected = torch.cat([ramp + other for other in range(size)])

        def call() -> Any:
            return dist.all_gather_into_tensor(gathered, part, group=group, async_op=True)

        return Operation("gather", call, (size - 1) / size, gathered, expected)

    def _for_each(self, group: Any, elements: int, sender: int) -> Any:
        """Return the data of rank `sender` in all_to_all and p2p: [size, elements / size], one row per receiver."""
        size = dist.get_world_size(group)
        rows = torch.arange(size, device=self.platform.device())[:, None]
        return self._ramp(elements // size) + 1000.0 * sender + rows

    def _all_to_all(self, group: Any, elements: int) -> Operation:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        source = self._for_each(group, elements, rank).flatten()
        received = torch.empty_like(source)
        ramp = self._ramp(elements // size)
        expected = torch.cat([ramp + 1000.0 * other + rank for other in range(size)])

        def call() -> Any:
            return dist.all_to_all_single(received, source, group=group, async_op=True)

        return Operation("all_to_all", call, (size - 1) / size, received, expected)

    def _p2p(self, group: Any, elements: int) -> Operation:
        """Each rank sends to the next one and receives from the previous one, as pipeline stages do."""
        size, rank, ranks = dist.get_world_size(group), dist.get_rank(group), dist.get_process_group_ranks(group)
        source = self._for_each(group, elements, rank).flatten()
        incoming = torch.empty_like(source)
        after, before = ranks[(rank + 1) % size], ranks[(rank - 1) % size]

        def call() -> Any:
            sends = dist.P2POp(dist.isend, source, after, group)
            return dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, incoming, before, group)])

        return Operation("p2p", call, 1.0, incoming, self._for_each(group, elements, (rank - 1) % size).flatten())

    def pair(self, first: int, second: int, elements: int) -> float | None:
        """Return the seconds to send `elements` from rank `first` to `second`, measured by `second`, else None."""
        # A message of the device on all ranks: the first one creates their communicator, which a batch of two cannot do.
        dist.all_reduce(torch.zeros(1, device=self.platform.device()))
        self.platform.synchronize()
        if self.rank not in (first, second):
            return None
        tensor = torch.zeros(elements, device=self.platform.device())
        operation = (dist.isend, tensor, second) if self.rank == first else (dist.irecv, tensor, first)
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            # A batch uses the communicator of all ranks; a single send would create one for the pair.
            for work in dist.batch_isend_irecv([dist.P2POp(*operation)]):
                work.wait()
            self.platform.synchronize()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds) if self.rank == second else None
