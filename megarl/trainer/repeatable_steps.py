"""Steps since the newest checkpoint, which trainers can train again: their batches, and gradient norms to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megarl.checkpoint.journal import Journal, JournalEntry, discard, training_settings
from megarl.checkpoint.kept_batches import KeptBatches
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.schema import Recipe
from megarl.types import Metrics

GRAD_NORM = "actor/grad_norm"


@dataclass
class RepeatableSteps:
    """The steps since the newest checkpoint. batches: of these steps."""

    batches: KeptBatches
    retrained: int = 0  # steps that were trained again, in this session
    _norms: dict[int, float] = field(default_factory=dict)  # by step: gradient norm of its first training

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

    def leave_out(self, steps: Iterable[int]) -> None:
        """Train no batch of `steps` again: the trainers have gone back to the weights before them."""
        steps = list(steps)
        self.batches.leave_out(steps)
        for step in steps:
            self._norms.pop(step, None)


def keep_steps(
    recipe: Recipe, folder: RunDirectory, entry: JournalEntry | None, notice: Callable[[str], None]
) -> tuple[RepeatableSteps | None, Journal | None]:
    """Return the batches that are kept to train them again, and the journal; None where the recipe does not want it.

    entry: of the journal with which this session goes on. Deletes other files of an earlier session.
    """
    train = recipe.train
    batches = KeptBatches(folder.batches, durable=train.journal, earlier=entry.batches if entry is not None else ())
    repeatable = RepeatableSteps(batches) if train.trainer_restarts or train.journal else None
    if not train.journal:
        discard(folder.journal)
        return repeatable, None
    return repeatable, Journal(folder.journal, batches, training_settings(recipe), entry, notice)
