"""Stop a run after too many consecutive steps in which every update was skipped; gradient norms of the updates that were not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.algorithms.spikes import GradNorms
from megarl.checkpoint.folder import checkpoint_step, list_checkpoints
from megarl.checkpoint.next_commands import Repetition
from megarl.errors import SpoiledWeights
from megarl.recipe.schema import TrainConfig


@dataclass
class Streak:
    """Consecutive skipped steps up to the latest one."""

    first: int
    steps: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # number of steps per cause


class SkippedSteps:
    """Counts consecutive skipped steps, and holds gradient norms of applied updates, separately for actor and critic.

    repetition: how the user can repeat a step.
    """

    def __init__(self, config: TrainConfig, repetition: Repetition) -> None:
        self.limit, self.repetition = config.stop_after_skipped, repetition
        self.checkpoints = repetition.run.checkpoints
        self.norms = {role: GradNorms(config) for role in ("actor", "critic")}
        self._streaks: dict[str, Streak] = {}

    def restore_norms(self, norms: Mapping[str, Iterable[float]]) -> None:
        """Restore the gradient norms from a checkpoint. norms: by role; empty in checkpoints of older versions."""
        for role, of_role in self.norms.items():
            of_role.restore(norms.get(role, ()))

    def note(self, role: str, step: int, cause: str | None) -> None:
        """Record `step` of `role`. `cause`: why all its updates were skipped; None if at least one was applied.

        Do not call it for steps in which `role` is not updated (the critic's warm-up).
        """
        if cause is None:
            self._streaks.pop(role, None)
            return
        streak = self._streaks.setdefault(role, Streak(step))
        streak.steps += 1
        streak.causes[cause] += 1

    def streaks(self) -> dict[str, Streak]:
        """Return a copy of the counts, for `reset_to`."""
        return copy.deepcopy(self._streaks)

    def reset_to(self, streaks: dict[str, Streak]) -> None:
        """Forget what was noted since `streaks` returned these counts."""
        self._streaks = copy.deepcopy(streaks)

    def plain_streaks(self) -> dict[str, dict[str, Any]]:
        """Return the counts as plain values, for `restore_streaks`."""
        return {
            role: {"first": streak.first, "steps": streak.steps, "causes": dict(streak.causes)}
            for role, streak in self._streaks.items()
        }

    def restore_streaks(self, streaks: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the counts by the ones in `plain_streaks`."""
        self._streaks = {
            role: Streak(each["first"], each["steps"], Counter(each["causes"])) for role, each in streaks.items()
        }

    @property
    def keeps_checkpoints(self) -> bool:
        """True during a streak of a run with a limit: existing checkpoints must stay.

        The present weights may be the cause of the skipped updates, so a new checkpoint would displace a better one.
        """
        return self.limit > 0 and bool(self._streaks)

    def check(self, step: int) -> None:
        """Raise SpoiledWeights if no weight has changed in the last `limit` steps, up to `step`."""
        for role, streak in self._streaks.items():
            if 0 < self.limit <= streak.steps:
                causes = ", ".join(f"{cause} ({count} of them)" for cause, count in streak.causes.items())
                raise SpoiledWeights(
                    f"nothing was learned in {streak.steps} consecutive steps, {streak.first} to {step}: every update of the "
                    f"{role} was skipped ({role}/skipped_updates), because {causes}. {self._advice(streak.first)} Check "
                    f"metrics.jsonl and samples/ of the steps before {streak.first}, and change the cause: "
                    f"{role}.optimizer.lr, the data, the reward. train.stop_after_skipped=0 continues such runs."
                )

    def _advice(self, first: int) -> str:
        """Sentence on the checkpoint to resume from.

        Step `first` - 1 produced the weights with which step `first` skipped its updates. Weights of earlier steps are
        good, because an update of them was applied.
        """
        older = [path for path in list_checkpoints(self.checkpoints) if checkpoint_step(path) < first]
        good = [path for path in older if checkpoint_step(path) < first - 1]
        if good:
            return f"Resume from the last checkpoint with good weights: train.resume={good[-1]}."
        if older:
            return f"The only earlier checkpoint, {older[-1]}, has the weights with which step {first} failed."
        return "No earlier checkpoint exists: start a new run with train.save_every."
