"""The teacher as the controller sees it: engines that read a batch before the policy learns from it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from megarl.batching.packing import split_evenly
from megarl.cluster.calls import Service, wait_for_all
from megarl.types import Group

T = TypeVar("T")


class Teacher:
    """Engines of a fixed model. `timeout`: seconds that one may take for its part of a step (`teacher.timeout`)."""

    def __init__(self, services: Sequence[Service], timeout: float):
        self.services, self.timeout = list(services), timeout

    def read(self, groups: Sequence[Group]) -> None:
        """Have every sample of `groups` read. Their vectors then lie elsewhere, with the teacher's scores beside them.

        Each engine reads neighbours, about as many groups as the others: a batch is divided in the same way every time.
        """
        parts = [[groups[number] for number in part] for part in split_evenly(len(groups), len(self.services))]
        services = self.services[: len(parts)]
        reading = [service.call("read", part) for service, part in zip(services, parts, strict=True)]
        self._wait(services, reading)
        asked = [(service, group) for service, part in zip(services, parts, strict=True) for group in part]
        found = self._wait(
            [service for service, _ in asked],
            [service.call_with_data("collect", group.number) for service, group in asked],
        )
        for (_, group), (_, data) in zip(asked, found, strict=True):
            for sample in group.samples:
                sample.data = data

    def _wait(self, services: Sequence[Service], calls: Sequence[Future[T]]) -> list[T]:
        return wait_for_all(services, calls, doing="read the step's samples", key="teacher.timeout", limit=self.timeout)
