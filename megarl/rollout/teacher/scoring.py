"""The engines of the teachers, which compute log-probs of a batch before the policy trains on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from megarl.batching.packing import split_evenly
from megarl.cluster.calls import gather, wait, when_done
from megarl.rollout.engine_handle import TeacherHandle
from megarl.rollout.fleet.fixed import FixedModelEngines
from megarl.types import DataRef, Group

Scored = list[tuple[None, DataRef]]
"""Location of the vectors of each group of a part."""


class Teacher:
    """Engines of fixed models: of one for all groups, or of one for the groups of each data source."""

    def __init__(self, by_source: Mapping[str, FixedModelEngines[TeacherHandle]], check: Callable[[], None]):
        """by_source: the teacher of each data source; "": of all sources. check: raises if the run cannot go on; it is called every
        second, and polls the engines."""
        self.by_source, self._check = by_source, check

    def score(self, groups: Sequence[Group]) -> None:
        """Add the teacher's log-probs to the vectors of every sample. The vectors are then stored in the teacher's processes.

        Groups are split over the engines of their teacher evenly and in order, so the same batch is always split in the same way. The part
        of an engine that dies is scored again as a whole, by another process.
        """
        sources = {group.data_source for group in groups}
        assert "" in self.by_source or sources <= {*self.by_source}, f"preflight checks the rows' sources: {sources}"
        parts: list[tuple[list[Group], Future[Scored]]] = []
        for source, engines in self.by_source.items():
            own = [group for group in groups if source in ("", group.data_source)]
            for number, indices in enumerate(split_evenly(len(own), len(engines.engines)) if own else []):
                part = [own[index] for index in indices]
                parts.append((part, engines.ask(functools.partial(_score, part), number)))
        for part, answer in parts:
            scored: Scored = wait(answer, self._check)
            for group, (_, data) in zip(part, scored, strict=True):
                for sample in group.samples:
                    sample.data = data


def _score(groups: list[Group], engine: TeacherHandle) -> Future[Scored]:
    """Let an engine score `groups`, and return the locations of their vectors."""
    process = TeacherHandle(engine.service)  # the handle may get another one
    result: Future[Scored] = Future()

    def collect(scored: Future[None]) -> None:
        scored.result()
        collected = gather([process.collect(group.number) for group in groups])
        when_done(collected, lambda done: result.set_result(done.result()), result)

    when_done(process.score(groups), collect, result)
    return result
