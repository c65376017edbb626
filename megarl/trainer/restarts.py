"""Count the restarts of failed trainers (`train.trainer_restarts`): limit and metric. `recovery.py` restarts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.cluster.failures import WorkerFailed
from megarl.errors import add_note
from megarl.types import Metrics


@dataclass
class TrainerRestarts:
    """Restarts of one run's trainers.

    most: failures in a row without a new step with which the run goes on (`train.trainer_restarts`). start: ends all trainer
    processes, and starts new ones behind the same handles, with the starting model. check: raises WorkerFailed if a trainer has
    died, until `start` has started others.
    """

    most: int
    start: Callable[[], None]
    check: Callable[[], None]
    restarts: int = 0  # of this session
    newest_failure: WorkerFailed | None = None
    _in_a_row: int = 0
    _furthest: int = -1  # step of the weights at the newest failure

    def count(self, error: WorkerFailed, trained: int) -> None:
        """Count a failure of trainers with the weights after step `trained`. Raises `error` if there were too many."""
        self._in_a_row = 1 if trained > self._furthest else self._in_a_row + 1
        self._furthest = max(self._furthest, trained)
        if self._in_a_row > self.most:
            text = (
                f"The trainers do not start again: this is failure {self._in_a_row} without a new step, and "
                f"train.trainer_restarts is {self.most}."
            )
            add_note(error, text)
            raise error
        self.restarts, self.newest_failure = self.restarts + 1, error

    @property
    def notice(self) -> str:
        """The message of the newest failure and the restart after it."""
        count = f"failure {self._in_a_row} of at most {self.most} without a new step"
        return f"{self.newest_failure}\nThe trainers start again ({count}; train.trainer_restarts)"

    def metrics(self) -> Metrics:
        """Return the metrics of this session so far."""
        return {"recovery/trainer_restarts": float(self.restarts)}
