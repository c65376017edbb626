"""Trainers that have failed start again while the engines go on (`train.trainer_restarts`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.checkpoint.kept_batches import KeptBatches
from megarl.cluster.failures import WorkerFailed
from megarl.types import Metrics

GRAD_NORM = "actor/grad_norm"


@dataclass
class TrainerRestarts:
    """Restarts of one run's trainers.

    most: failures in a row without a new step with which the run goes on (`train.trainer_restarts`). batches: of the steps since
    the newest checkpoint. start: ends all trainer processes, and starts new ones behind the same handles, with the starting
    model. check: raises WorkerFailed if a trainer has died, until `start` has started others.
    """

    most: int
    batches: KeptBatches
    start: Callable[[], None]
    check: Callable[[], None]
    restarts: int = 0  # of this session
    newest_failure: WorkerFailed | None = None
    retrained: int = 0  # steps that were trained again, in this session
    _in_a_row: int = 0
    _furthest: int = -1  # step of the weights at the newest failure
    _norms: dict[int, float] = field(default_factory=dict)  # by step: gradient norm of its first training

    def count(self, error: WorkerFailed, trained: int) -> None:
        """Count a failure of trainers with the weights after step `trained`. Raises `error` if there were too many."""
        self._in_a_row = 1 if trained > self._furthest else self._in_a_row + 1
        self._furthest = max(self._furthest, trained)
        if self._in_a_row > self.most:
            raise error
        self.restarts, self.newest_failure = self.restarts + 1, error

    def record(self, step: int, metrics: Metrics) -> None:
        """Remember the gradient norm of `step`, to compare it if the step is trained again."""
        if GRAD_NORM in metrics:
            self._norms[step] = float(metrics[GRAD_NORM])

    def differences(self, step: int, metrics: Metrics) -> list[float]:
        """Return by how much the gradient norm of a repeated step differs from the first one; [] if the step has none.

        0: bitwise equal. inf: one of them is NaN.
        """
        if step not in self._norms or GRAD_NORM not in metrics:
            return []
        first, again = self._norms[step], float(metrics[GRAD_NORM])
        if first == again or (math.isnan(first) and math.isnan(again)):
            return [0.0]
        return [math.inf if math.isnan(first - again) else abs(first - again)]

    def keep_since(self, checkpoint: int) -> None:
        """Delete batches and norms of the steps up to `checkpoint`, which no restart needs any more."""
        self.batches.forget_through(checkpoint)
        self._norms = {step: norm for step, norm in self._norms.items() if step > checkpoint}

    def leave_out(self, first: int, last: int) -> None:
        """Train no batch of the steps from `first` to `last` again: the trainers have gone back to the weights before them."""
        for step in range(first, last + 1):
            self.batches.keep(step, [])
            self._norms.pop(step, None)

    def metrics(self) -> Metrics:
        """Return the metrics of this session so far."""
        return {
            "recovery/trainer_restarts": float(self.restarts),
            "recovery/retrained_steps": float(self.retrained),
        }
