"""The engines of the teachers, which compute log-probs of a batch before the policy trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import islice
from typing import TypeVar

from megarl.batching.packing import split_evenly
from megarl.cluster.calls import wait_for_all
from megarl.recipe.judge import TeacherConfig
from megarl.rollout.engine_handle import TeacherHandle
from megarl.types import Group

T = TypeVar("T")


class Teacher:
    """Engines of fixed models: of one for all groups, or of one for the groups of each data source."""

    def __init__(self, engines: Sequence[TeacherHandle], settings: TeacherConfig):
        """`engines`: in the order of `settings.by_key`."""
        self.timeout = settings.timeout  # seconds for an engine's part of a step
        rest = iter(engines)
        teachers = [list(islice(rest, teacher.engines)) for teacher in settings.by_key.values()]
        self.by_source = dict(zip(settings.by_source or [""], teachers, strict=True))  # "": all sources

    def score(self, groups: Sequence[Group]) -> None:
        """Add the teacher's log-probs to the vectors of every sample. The vectors are then stored in the teacher's processes.

        Groups are split over the engines of their teacher evenly and in order, so the same batch is always split in the same way.
        """
        sources = {group.data_source for group in groups}
        assert "" in self.by_source or sources <= {*self.by_source}, f"preflight checks the rows' sources: {sources}"
        shares = [share for source in self.by_source for share in self._shares(groups, source)]
        self._wait([engine for engine, _ in shares], [engine.score(part) for engine, part in shares])
        scored = [(engine, group) for engine, part in shares for group in part]
        vectors = self._wait(
            [engine for engine, _ in scored], [engine.collect(group.number) for engine, group in scored]
        )
        for (_, group), (_, data) in zip(scored, vectors, strict=True):
            for sample in group.samples:
                sample.data = data

    def _shares(self, groups: Sequence[Group], source: str) -> list[tuple[TeacherHandle, list[Group]]]:
        """Return the engines of a source's teacher that have groups of the batch, with these groups."""
        engines, scored = self.by_source[source], [group for group in groups if source in ("", group.data_source)]
        parts = split_evenly(len(scored), len(engines)) if scored else []
        return [(engine, [scored[n] for n in part]) for engine, part in zip(engines, parts, strict=False)]

    def _wait(self, engines: Sequence[TeacherHandle], calls: Sequence[Future[T]]) -> list[T]:
        return wait_for_all(engines, calls, doing="read the step's samples", key="teacher.timeout", limit=self.timeout)
