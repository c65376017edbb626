"""Trainer and engine ranks of a sharded weight sync, as threads of one process, so that a test can compare their parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megarl.weight_sync.sender import start_session
from megarl.weight_sync.session import Session, UpdateReport, compare_reports, host_id, merge_reports
from megarl.weight_sync.sharded.receiver import ShardedReceiver
from megarl.weight_sync.sharded.sender import ShardedSender
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder

SHAPES = {"embed": (64, 48), "norm": (48,), "experts.0": (16, 8), "experts.1": (16, 8), "odd": (7, 5)}


def checkpoint(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Rank:
    """A rank's parameters and the checkpoint slice of each: (name, rows, columns)."""

    def __init__(self, slices: list[tuple[str, slice, slice]], dtype: torch.dtype = torch.float32) -> None:
        self.slices, self.memory = slices, []
        builder = SliceTableBuilder()
        for number, (name, rows, columns) in enumerate(slices):
            shape = SHAPES[name]
            high, wide = len(range(shape[0])[rows]) if len(shape) > 1 else 1, len(range(shape[-1])[columns])
            stride = wide + number % 2  # every second parameter has a gap after each row
            self.memory.append(
                torch.full((3 + high * stride,), torch.nan, dtype=dtype)[3:]
            )  # not at its storage's start
            first = (range(shape[0])[rows].start if len(shape) > 1 else 0, range(shape[-1])[columns].start)
            parameter = builder.parameter(f"p{number}", str(dtype).removeprefix("torch."))
            builder.add(builder.tensor(name, shape), (*first, high, wide), parameter, 0, stride)
        self.description: SliceTable = builder.build()

    def view(self, number: int) -> torch.Tensor:
        _, _, _, rows, columns, _, offset, stride = self.description.slices[number].tolist()
        memory = self.memory[number]
        return memory.as_strided((rows, columns), (stride, 1), memory.storage_offset() + offset)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for number in range(len(self.slices)):
            self.view(number).copy_(self.true(number, weights))

    def true(self, number: int, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        name, rows, columns = self.slices[number]
        weight = weights[name]
        return (weight if weight.dim() > 1 else weight[None])[rows, columns].to(self.memory[number].dtype)

    def tensors(self) -> list[torch.Tensor]:
        return self.memory

    # An engine's target
    def tensor(self, number: int) -> torch.Tensor:
        return self.memory[number]

    def mark_written(self, number: int, elements: int) -> None:
        self.left[number] -= elements
        if self.left[number] == 0 and self.examine is not None:
            self.examine([number], self.tensor)

    def begin(self, examine: Any) -> None:
        self.examine = examine
        self.left = [self.view(number).numel() for number in range(len(self.slices))]


ALL = slice(None)


def trainers() -> list[Rank]:
    """Two replicas of TP2 by rows; each replica has one expert; other tensors are on all ranks."""
    ranks = []
    for rank in range(4):
        half = slice(32 * (rank % 2), 32 * (rank % 2 + 1))
        ranks.append(
            Rank([("embed", half, ALL), ("norm", ALL, ALL), (f"experts.{rank // 2}", ALL, ALL), ("odd", ALL, ALL)])
        )
    return ranks


def engines() -> list[Rank]:
    """Two replicas of TP2 by columns, one of them in bfloat16."""
    ranks = []
    for rank in range(4):
        half = slice(24 * (rank % 2), 24 * (rank % 2 + 1))
        slices = [("embed", rows, half) for rows in (slice(0, 20), slice(20, 64))]
        rest = [(name, ALL, ALL) for name in ("norm", "experts.0", "experts.1", "odd")]
        ranks.append(Rank([*slices, *rest], torch.bfloat16 if rank >= 2 else torch.float32))
    return ranks


def open_session(shm_dir: Any, places: list[str] | None = None, **options: Any) -> tuple[Session, Any]:
    """Open a session; returns it and its store. `places`: the four engine ranks' hosts ("here": the trainers' host)."""
    here = host_id(str(shm_dir))
    hosts = [here if place == "here" else place for place in places or ["here"] * 4]
    settings = {
        "transport": "auto",
        "sharded": True,
        "bucket_bytes": 2048,
        "timeout": 20.0,
        "check_every": 0,
        "heartbeat_timeout": 8.0,
        **options,
    }
    receivers = [(f"e{rank // 2}/{rank % 2}", host) for rank, host in enumerate(hosts)]
    return start_session(settings.pop("host", "127.0.0.1"), [here] * 4, receivers, shm_dir=str(shm_dir), **settings)


class ShardedCluster:
    def __init__(self, session: Session, store: Any, trainers_here: list[int], engines_here: list[int]) -> None:
        """`trainers_here`, `engines_here`: numbers of the ranks (0 to 3) that run as threads of this process."""
        self.session, self.store = session, store
        self.trainers = [rank for number, rank in enumerate(trainers()) if number in trainers_here]
        self.engines = [rank for number, rank in enumerate(engines()) if number in engines_here]
        self.pool = ThreadPoolExecutor(16)
        self.senders = [
            ShardedSender(session, rank, trainer.description, trainer.tensors, store if rank == 0 else None)
            for rank, trainer in zip(trainers_here, self.trainers, strict=True)
        ]
        self.receivers = [ShardedReceiver(session, session.names[rank]) for rank in engines_here]
        self.weights: dict[str, torch.Tensor] = {}
        self.exports = 0

    def connect(self) -> None:
        for receiver, rank in zip(self.receivers, self.engines, strict=True):
            assert [table.digest for table in receiver.collect_held()] == [
                trainer.description.digest for trainer in trainers()
            ]
            receiver.publish_needed(rank.description)

    def export(self) -> Any:
        self.exports += 1
        return self.weights.items()

    def receive(self, number: int, version: int) -> UpdateReport:
        receiver, rank = self.receivers[number], self.engines[number]
        try:
            rank.begin(receiver.begin(version))
            receiver.receive(rank)
            return receiver.finish()
        except BaseException as error:
            receiver.fail(f"{type(error).__name__}: {error}")
            raise

    def start(self, version: int) -> tuple[list[Any], list[Any]]:
        self.weights = checkpoint(version)
        for rank in self.trainers:
            rank.load(self.weights)
        receiving = [self.pool.submit(self.receive, number, version) for number in range(len(self.receivers))]
        sending = [self.pool.submit(sender.send, version, self.export) for sender in self.senders]
        return sending, receiving

    def update(self, version: int) -> tuple[UpdateReport, UpdateReport]:
        sending, receiving = self.start(version)
        sent, received = (merge_reports([pending.result(30) for pending in side]) for side in (sending, receiving))
        compare_reports(sent, received)
        for rank in self.engines:
            for number in range(len(rank.slices)):
                assert torch.equal(rank.view(number), rank.true(number, self.weights)), rank.slices[number]
        return sent, received

    def close(self) -> None:
        for member in [*self.senders, *self.receivers]:
            member.close()
        self.pool.shutdown(wait=False)


@contextlib.contextmanager
def open_cluster(shm_dir: Any, places: list[str] | None = None, **options: Any) -> Iterator[ShardedCluster]:
    cluster = ShardedCluster(*open_session(shm_dir, places, **options), list(range(4)), list(range(4)))
    try:
        yield cluster
    finally:
        cluster.close()


def replaced(report: UpdateReport, **changes: Any) -> UpdateReport:
    return dataclasses.replace(report, **changes)
