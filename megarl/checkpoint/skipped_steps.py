"""A run that learns nothing any more: steps in a row whose every update was skipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.folder import checkpoint_step, list_checkpoints


@dataclass
class _Streak:
    """Steps in a row, the last of them known to be the latest."""

    first: int
    steps: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # by how many of the steps


class SkippedSteps:
    """Counts such steps, of the actor and of the critic apart.

    limit: `train.stop_after_skipped`. checkpoints: the folder of the run's.
    """

    def __init__(self, limit: int, checkpoints: Path) -> None:
        self.limit, self.checkpoints = limit, checkpoints
        self._streaks: dict[str, _Streak] = {}

    def note(self, role: str, step: int, cause: str | None) -> None:
        """Why every update of `role` in `step` was skipped; None: at least one was made.

        A step in which `role` was not to learn (the critic's warm-up) is not noted, and changes nothing.
        """
        if cause is None:
            self._streaks.pop(role, None)
            return
        streak = self._streaks.setdefault(role, _Streak(step))
        streak.steps += 1
        streak.causes[cause] += 1

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the checkpoints that there are should stay: the weights have not changed since, and may be what is
        wrong, so that another checkpoint would take the place of a better one. Never where the run does not stop."""
        return self.limit > 0 and bool(self._streaks)

    def check(self, step: int) -> None:
        """Raise RuntimeError where `limit` steps in a row, up to `step`, have changed no weight."""
        for role, streak in self._streaks.items():
            if 0 < self.limit <= streak.steps:
                causes = ", ".join(f"{cause} ({count} of them)" for cause, count in streak.causes.items())
                raise RuntimeError(
                    f"nothing was learned in {streak.steps} steps in a row, {streak.first} to {step}: every update of the "
                    f"{role} was skipped ({role}/skipped_updates), because {causes}. {self._way_back(streak.first)} Look at "
                    f"what metrics.jsonl and samples/ hold of the steps before {streak.first}, and change what led there: "
                    f"{role}.optimizer.lr, the data, the reward. train.stop_after_skipped=0 lets a run go on all the same."
                )

    def _way_back(self, first: int) -> str:
        """Which checkpoint to go on from. The update of step `first` - 1 made the weights that step `first` could not
        learn with; older ones are known to be good, since an update of them was made."""
        older = [path for path in list_checkpoints(self.checkpoints) if checkpoint_step(path) < first]
        good = [path for path in older if checkpoint_step(path) < first - 1]
        if good:
            return f"The last checkpoint whose weights are known to be good: go on with train.resume={good[-1]}."
        if older:
            return f"There is one checkpoint of before, {older[-1]}, with the weights that step {first} failed with."
        return "There is no checkpoint of before: start anew, with train.save_every."
