"""A rank that runs the collectives of every group of a layout: results, seconds, launches and device memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.commands.accept.rank import Rank
from megarl.config.training import MegatronConfig

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
    """One collective in one group, as one rank saw it. `seconds`: until it was done; `launch`: until the call had come
    back; `right`: whether its values were. `bytes`: that a rank sends or receives in it, by the ring's count."""

    group: str
    collective: str
    ranks: tuple[int, ...]
    seconds: float
    launch: float
    bytes: float
    right: bool


class CollectiveRank(Rank):
    """All methods are called by all ranks together."""

    def lay_out(self, megatron: MegatronConfig, timeout: float) -> dict[str, tuple[int, ...]]:
        """Form the groups as a trainer does; returns the ranks of each of this rank's."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        from megarl.megatron.model import initialize_parallel

        initialize_parallel(megatron, timeout)
        self.groups = {"all": dist.group.WORLD}
        for name, getter in GROUPS.items():
            group = getattr(parallel_state, getter)()
            if dist.get_world_size(group) > 1:
                self.groups[name] = group
        return {name: tuple(dist.get_process_group_ranks(group)) for name, group in self.groups.items()}

    def memory(self) -> float | None:
        """GiB of the device that are free, without what torch's allocator keeps; None on a CPU."""
        self.platform.empty_cache()
        return self.platform.free_memory()

    def collectives(self, name: str, elements: int) -> list[Timing]:
        """Every collective in the group `name`, on float32 tensors of `elements`, all ranks of a group at once."""
        import torch
        import torch.distributed as dist

        group = self.groups.get(name)
        if group is None:
            dist.barrier()
            return []
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        elements -= elements % (size * size)
        device, part = self.platform.device(), elements // size
        ranks = tuple(dist.get_process_group_ranks(group))
        ramp = torch.arange(part, device=device, dtype=torch.float32) % 251
        results: list[Timing] = []

        def run(collective: str, call: Callable[[], Any], share: float, right: Callable[[], bool]) -> None:
            seconds, launches = [], []
            for _ in range(REPEATS):
                dist.barrier(group=group)
                self.platform.synchronize()
                began = time.perf_counter()
                work = call()
                launched = time.perf_counter()
                for one in work if isinstance(work, list) else [work]:
                    one.wait()
                self.platform.synchronize()
                seconds.append(time.perf_counter() - began)
                launches.append(launched - began)
            timing = statistics.median(seconds), statistics.median(launches)
            results.append(Timing(name, collective, ranks, *timing, 4 * elements * share, right()))

        whole = torch.empty(elements, device=device)

        def all_reduce() -> Any:
            whole.view(size, part).copy_(ramp).add_(rank)
            return dist.all_reduce(whole, group=group, async_op=True)

        sums = ramp * size + size * (size - 1) / 2
        ring = (size - 1) / size
        run("all_reduce", all_reduce, 2 * ring, lambda: bool((whole.view(size, part) == sums).all()))

        own, gathered = ramp + rank, torch.empty(elements, device=device)
        expected = torch.stack([ramp + other for other in range(size)]).flatten()
        run(
            "gather", lambda: dist.all_gather_into_tensor(gathered, own, group=group, async_op=True), ring,
            lambda: bool((gathered == expected).all()),
        )  # fmt: skip

        source = torch.empty(elements, device=device)
        source.view(size, part).copy_(ramp).add_(1000 * rank)
        source.view(size, part).add_(torch.arange(size, device=device)[:, None])
        received = torch.empty(elements, device=device)
        swapped = torch.stack([ramp + 1000 * other + rank for other in range(size)]).flatten()
        run(
            "all_to_all", lambda: dist.all_to_all_single(received, source, group=group, async_op=True), ring,
            lambda: bool((received == swapped).all()),
        )  # fmt: skip

        incoming = torch.empty(elements, device=device)
        after, before = ranks[(rank + 1) % size], ranks[(rank - 1) % size]

        def neighbours() -> Any:
            sends = dist.P2POp(dist.isend, source, after, group)
            return dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, incoming, before, group)])

        theirs = torch.empty(elements, device=device)
        theirs.view(size, part).copy_(ramp).add_(1000 * ((rank - 1) % size))
        theirs.view(size, part).add_(torch.arange(size, device=device)[:, None])
        run("p2p", neighbours, 1.0, lambda: bool((incoming == theirs).all()))
        dist.barrier()
        return results

    def pair(self, first: int, second: int, elements: int) -> float | None:
        """Seconds that `elements` take from rank `first` to `second`, measured there; None on other ranks."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        if self.rank not in (first, second):
            return None
        tensor = torch.zeros(elements, device=self.platform.device())
        operation = (dist.isend, tensor, second) if self.rank == first else (dist.irecv, tensor, first)
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            # In a batch, which uses the communicator of all ranks: a single send would make one for the pair.
            for work in dist.batch_isend_irecv([dist.P2POp(*operation)]):
                work.wait()
            self.platform.synchronize()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds) if self.rank == second else None
