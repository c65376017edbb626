"""Trainers that have failed start again while the engines go on (`train.trainer_restarts`)."""

from __future__ import annotations

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
    model. check: raises WorkerFailed if a trainer has died since its last call.
    """

    most: int
    batches: KeptBatches
    start: Callable[[], None]
    check: Callable[[], None]
    restarts: int = 0  # of this session
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
        self.restarts += 1

    def record(self, step: int, metrics: Metrics) -> None:
        """Remember the gradient norm of `step`, to compare it if the step is trained again."""
        if GRAD_NORM in metrics:
            self._norms[step] = float(metrics[GRAD_NORM])

    def difference(self, step: int, metrics: Metrics) -> float:
        """Return by how much the gradient norm of a repeated step differs from the first: 0 if it is the same to the last bit."""
        first, again = self._norms.get(step), metrics.get(GRAD_NORM)
        return 0.0 if first is None or again is None or first == again else abs(first - float(again))

    def keep_since(self, checkpoint: int) -> None:
        """Forget what is needed only up to the checkpoint of this step."""
        self.batches.forget_through(checkpoint)
        self._norms = {step: norm for step, norm in self._norms.items() if step > checkpoint}

    def metrics(self) -> Metrics:
        """Return the metrics of this session so far."""
        return {
            "recovery/trainer_restarts": float(self.restarts),
            "recovery/retrained_steps": float(self.retrained),
        }
