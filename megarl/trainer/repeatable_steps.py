"""Steps since the newest checkpoint, which trainers can train again: their batches, and gradient norms to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megarl.checkpoint.journal import Journal, JournalEntry, training_settings
from megarl.checkpoint.kept_batches import KeptBatches
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.schema import Recipe
from megarl.types import Metrics

GRAD_NORM = "actor/grad_norm"
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.025}
"""By `model.dtype`: largest difference of gradient norms, as a share of the norm, that counts as rounding. The first step in another
layout differs by 5e-8 in float32 (tests/runs/test_elastic.py); later ones by more, since Adam magnifies the rounding of small gradients.
In bfloat16 rounding also routes tokens to other experts."""


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
        """Return by how much the gradient norm of a repeated step differs from the first one, as a share of the larger one; [] if
        the step has none.

        0: bitwise equal. inf: one of them is NaN.
        """
        if step not in self._norms or GRAD_NORM not in metrics:
            return []
        first, again = self._norms[step], float(metrics[GRAD_NORM])
        if first == again or (math.isnan(first) and math.isnan(again)):
            return [0.0]
        share = abs(first - again) / max(abs(first), abs(again))
        return [math.inf if math.isnan(share) else share]

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


def is_rounding(differences: Sequence[float], dtype: str) -> bool:
    """Return whether `differences` of gradient norms are small enough for rounding in `dtype`, a value of `model.dtype`."""
    return max(differences, default=0.0) <= ROUNDING[dtype]


def norms_text(differences: Sequence[float], dtype: str, changed: Sequence[str] = ()) -> str:
    """Describe `differences` of gradient norms, the end of a notice. dtype: `model.dtype`.

    changed: settings of the layout that differ between the first and the second training, "key before -> now".
    """
    most = max(differences)
    if not most:
        return ", with the same gradient norms"
    text = f"; their gradient norms differ by up to {100 * most:.2g} %"
    layout = f"a layout that has changed ({', '.join(changed)})" if changed else "kernels that do not repeat their sums"
    if is_rounding(differences, dtype):
        return f"{text}: rounding, as from {layout}"
    return (
        f"{text}. Rounding from {layout} stays below {100 * ROUNDING[dtype]:g} % in {dtype}, so the trainers have other weights than "
        "the ones that sampled the next batch. To sample these steps again, set train.resume to the checkpoint's path"
    )


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
        return repeatable, None
    return repeatable, Journal(folder.journal, batches, training_settings(recipe), entry, notice)
