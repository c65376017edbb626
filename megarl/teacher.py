"""The teacher as the controller sees it: engines that read a batch before the policy learns from it."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.rollout.calls import Service, wait_for_all
from megarl.schedule import split_evenly
from megarl.types import Group


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
        wait_for_all(services, reading, doing="read the step's samples", key="teacher.timeout", limit=self.timeout)
        for service, part in zip(services, parts, strict=True):
            for group, collected in [(group, service.call_with_data("collect", group.number)) for group in part]:
                _, data = collected.result()
                for sample in group.samples:
                    sample.data = data
