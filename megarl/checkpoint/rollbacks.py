"""When the trainers go back to a checkpoint after spikes of the gradient norm (`train.on_spike: rollback`). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.recipe.schema import TrainConfig
from megarl.types import Metrics


@dataclass
class Rollbacks:
    """Spikes and rollbacks of a run.

    spikes: number in the last `window` steps that causes a rollback (`train.spikes_before_rollback`, `train.save_every`). most:
    rollbacks to one checkpoint (`train.rollbacks`).
    """

    spikes: int
    most: int
    window: int
    _of_step: dict[int, int] = field(default_factory=dict)  # spikes since the newest rollback, by step
    _to: Counter[int] = field(default_factory=Counter)  # rollbacks, by the checkpoint's step

    @classmethod
    def of(cls, train: TrainConfig) -> Rollbacks | None:
        """Return the state at the start of a session; None without `train.on_spike: rollback`."""
        if train.on_spike != "rollback":
            return None
        return cls(train.spikes_before_rollback, train.rollbacks, train.save_every)

    def note(self, step: int, spikes: int) -> None:
        """Record the number of spikes in `step`, the newest, and forget those before the window."""
        self._of_step = {earlier: count for earlier, count in self._of_step.items() if earlier > step - self.window}
        if spikes:
            self._of_step[step] = spikes

    @property
    def count(self) -> int:
        """Number of spikes in the window and after the newest rollback."""
        return sum(self._of_step.values())

    @property
    def first_step(self) -> int:
        """Step of the first of these spikes. There must be one."""
        return min(self._of_step)

    @property
    def is_due(self) -> bool:
        """True if there are enough spikes for a rollback."""
        return self.count >= self.spikes

    def is_allowed(self, checkpoint: int) -> bool:
        """Return whether the trainers may go back to `checkpoint` once more."""
        return self._to[checkpoint] < self.most

    def record(self, checkpoint: int) -> None:
        """Record a rollback to `checkpoint`."""
        self._to[checkpoint] += 1
        self.forget_spikes()

    def forget_spikes(self) -> None:
        """Count spikes from the next step on."""
        self._of_step.clear()

    def state(self) -> dict[str, list[list[int]]]:
        """Return spikes and rollbacks as plain values, for `restore`."""
        return {
            "of_step": [list(item) for item in self._of_step.items()],
            "to": [list(item) for item in self._to.items()],
        }

    def restore(self, state: Mapping[str, list[list[int]]]) -> None:
        """Go on with the `state` of a checkpoint or of the journal."""
        self._of_step = {step: count for step, count in state["of_step"]}
        self._to = Counter({step: count for step, count in state["to"]})

    def metrics(self, checkpoint: int, step: int) -> Metrics:
        """Return the metrics of a rollback after `step`."""
        return {
            "recovery/rollbacks": float(self._to.total()),
            "recovery/dropped_steps": float(step - checkpoint),
        }
