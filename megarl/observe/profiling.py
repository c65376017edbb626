"""Traces of a run's steps: when trainers and engines begin and end them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.base import Service, WorkerGroup
from megarl.observe.log import RunLog
from megarl.recipe.observe import ObserveConfig
from megarl.weight_sync.handover import wait_for_engines


@dataclass
class Profiling:
    """Traces in the steps of `observe.profile_steps`.

    services: the policy's engines. note: said of each traced step, of what the engines' software has fixed. folder: the run's
    `profile/`. patience: seconds that an engine may take to write its trace.
    """

    observe: ObserveConfig
    trainers: WorkerGroup
    services: Sequence[Service]
    log: RunLog
    folder: Path
    patience: float
    note: str = ""

    def before_sampling(self, step: int) -> None:
        """Call before the groups of `step` are admitted: its engines record from here on."""
        if self._traced(step):
            self._call_engines("start_profile", f"step_{step}")

    def after_sampling(self, step: int) -> None:
        """Call when the samples of `step` are there."""
        if self._traced(step):
            with self.log.phase("profile"):
                self._call_engines("stop_profile")

    @contextlib.contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Have the trainers of `observe.profile_ranks` record meanwhile."""
        if not self._traced(step):
            yield
            return
        folder = self.folder / f"step_{step}"
        self.trainers.call("start_profile", str(folder), self.observe.profile_ranks)
        yield
        with self.log.phase("profile"):
            self.trainers.call("stop_profile")
        self.log.notice(f"step {step} was traced, and is slower for it: {folder}")

    def nothing_to_compute(self, step: int) -> None:
        """Call where a step has no batch to train on."""
        if self._traced(step):
            self.log.notice(f"step {step} was not traced: there was nothing to compute in it")

    def _traced(self, step: int) -> bool:
        return step in self.observe.profile_steps

    def _call_engines(self, call: str, *args: str) -> None:
        chosen = [self.services[number] for number in self.observe.profile_engines]
        calls = [service.call(call, *args) for service in chosen]
        wait_for_engines(
            chosen, calls, doing="write a trace" if call == "stop_profile" else "begin a trace", limit=self.patience
        )
        if chosen and call == "stop_profile":
            note = f" ({self.note})" if self.note else ""
            self.log.notice(
                f"engines {self.observe.profile_engines} were traced while they sampled: {self.folder}{note}"
            )
