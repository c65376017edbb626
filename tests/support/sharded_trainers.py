"""Two trainer ranks, as threads of the test's process, that send a checkpoint's tensors by the sharded route.

Each holds one half of the rows of every matrix, as tensor-parallel ranks do, and all of every vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megarl.weight_sync.sender import start_session
from megarl.weight_sync.session import UpdateReport, compare_reports, host_id, merge_reports
from megarl.weight_sync.sharded.sender import ShardedSender
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder
from tests.support.engine_process import EngineProcess

RANKS = 2


class SlicedTrainers:
    def __init__(
        self, weights: Mapping[str, torch.Tensor], receivers: Sequence[Sequence[str]], check_every: int
    ) -> None:
        self.session, store = start_session(
            "127.0.0.1",
            [host_id()] * RANKS,
            [(name, host) for name, host in receivers],
            transport="auto",
            sharded=True,
            bucket_bytes=1 << 18,
            timeout=60.0,
            check_every=check_every,
            heartbeat_timeout=30.0,
        )
        self._weights = {name: weight.clone() for name, weight in weights.items()}
        self._senders = [
            ShardedSender(self.session, rank, self._describe(rank), self._of(rank), store if rank == 0 else None)
            for rank in range(RANKS)
        ]
        self._pool = ThreadPoolExecutor(RANKS)

    def _held(self, rank: int, weight: torch.Tensor) -> torch.Tensor:
        return weight if weight.dim() < 2 else weight.chunk(RANKS)[rank]

    def _of(self, rank: int):
        return lambda: [self._held(rank, weight) for weight in self._weights.values()]

    def _describe(self, rank: int) -> SliceTable:
        builder = SliceTableBuilder()
        for name, weight in self._weights.items():
            held = self._held(rank, weight)
            row = len(weight.chunk(RANKS)[0]) * rank if weight.dim() > 1 else 0
            rows, columns = held.shape if weight.dim() > 1 else (1, len(held))
            parameter = builder.parameter(name, str(weight.dtype).removeprefix("torch."))
            builder.add(builder.tensor(name, weight.shape), (row, 0, rows, columns), parameter, 0, columns)
        return builder.build()

    def update(self, engine: EngineProcess, version: int, weights: Mapping[str, torch.Tensor]) -> UpdateReport:
        """Send `weights` as `version`; returns the engine's report."""
        for name, weight in weights.items():
            self._weights[name].copy_(weight)
        sending = [self._pool.submit(sender.send, version, self._weights.items) for sender in self._senders]
        received = engine.update_weights(version)
        compare_reports(merge_reports([pending.result(60) for pending in sending]), received)
        return received

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._pool.shutdown(wait=False)
