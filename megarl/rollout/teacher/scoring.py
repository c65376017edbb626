"""The teacher's engines, which compute log-probs of a batch before the policy trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from megarl.batching.packing import split_evenly
from megarl.cluster.calls import wait_for_all
from megarl.rollout.engine_handle import TeacherHandle
from megarl.types import Group

T = TypeVar("T")


class Teacher:
    """Engines of a fixed model. `timeout`: seconds for an engine's part of a step (`teacher.timeout`)."""

    def __init__(self, engines: Sequence[TeacherHandle], timeout: float):
        self.engines, self.timeout = list(engines), timeout

    def score(self, groups: Sequence[Group]) -> None:
        """Add the teacher's log-probs to the vectors of every sample. The vectors are then stored in the teacher's processes.

        Groups are split over the engines evenly and in order, so the same batch is always split in the same way.
        """
        parts = [[groups[number] for number in part] for part in split_evenly(len(groups), len(self.engines))]
        engines = self.engines[: len(parts)]
        self._wait(engines, [engine.score(part) for engine, part in zip(engines, parts, strict=True)])
        scored = [(engine, group) for engine, part in zip(engines, parts, strict=True) for group in part]
        vectors = self._wait(
            [engine for engine, _ in scored], [engine.collect(group.number) for engine, group in scored]
        )
        for (_, group), (_, data) in zip(scored, vectors, strict=True):
            for sample in group.samples:
                sample.data = data

    def _wait(self, engines: Sequence[TeacherHandle], calls: Sequence[Future[T]]) -> list[T]:
        return wait_for_all(engines, calls, doing="read the step's samples", key="teacher.timeout", limit=self.timeout)
