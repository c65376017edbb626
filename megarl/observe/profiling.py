"""Start and stop the traces of trainers and engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megarl.observe.log import RunLog
from megarl.recipe.observe import ObserveConfig
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.start_engines import wait_for_start


class TracedTrainers(Protocol):
    """Trainers that can record a trace."""

    def start_profile(self, folder: Path, ranks: list[int]) -> None: ...

    def stop_profile(self) -> None: ...


@dataclass
class Profiling:
    """Traces the steps in `observe.profile_steps`.

    engines: engines of the policy. folder: `profile/` of the run. start_timeout: seconds an engine may take to write its
    trace. check: raises if a process has died or is stopped. note: text about the engines' profiler, added to the notice of a traced step.
    """

    observe: ObserveConfig
    trainers: TracedTrainers
    engines: Sequence[EngineHandle]
    log: RunLog
    folder: Path
    start_timeout: float
    check: Callable[[], None]
    note: str = ""

    def before_sampling(self, step: int) -> None:
        """Start the engines' traces. Call it before the groups of `step` are admitted."""
        if self._is_traced(step):
            self._wait([engine.start_profile(f"step_{step}") for engine in self._chosen()], doing="begin a trace")

    def after_sampling(self, step: int) -> None:
        """Stop the engines' traces. Call it when the samples of `step` are complete."""
        if not self._is_traced(step):
            return
        with self.log.phase("profile"):
            self._wait([engine.stop_profile() for engine in self._chosen()], doing="write a trace")
            if self._chosen():
                note = f" ({self.note})" if self.note else ""
                self.log.notice(
                    f"engines {self.observe.profile_engines} were traced during sampling: {self.folder}{note}"
                )

    @contextlib.contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Trace the trainers of `observe.profile_ranks` during the block."""
        if not self._is_traced(step):
            yield
            return
        folder = self.folder / f"step_{step}"
        self.trainers.start_profile(folder, self.observe.profile_ranks)
        yield
        with self.log.phase("profile"):
            self.trainers.stop_profile()
        self.log.notice(f"step {step} was traced, which slows it down: {folder}")

    def nothing_to_compute(self, step: int) -> None:
        """Log that a step without a batch has no trace."""
        if self._is_traced(step):
            self.log.notice(f"step {step} was not traced: it had no batch to train on")

    def _is_traced(self, step: int) -> bool:
        return step in self.observe.profile_steps

    def _chosen(self) -> list[EngineHandle]:
        return [self.engines[number] for number in self.observe.profile_engines]

    def _wait(self, calls: Sequence[Future[None]], *, doing: str) -> None:
        wait_for_start(self._chosen(), calls, doing=doing, limit=self.start_timeout, check=self.check)
