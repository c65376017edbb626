"""Checkpoints of a run whose trainers fail, or which resumes from another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.folder import list_checkpoints
from megarl.cluster.failures import Failure, ProcessInfo, WorkerFailed
from megarl.observe.log import RunLog
from megarl.recipe.schema import Recipe
from tests.support.checkpoint_parts import Trainers, saver, state
from tests.test_train import build


class DyingTrainers(Trainers):
    """One of them dies when all have written their parts of the first save."""

    deaths = 1

    def save_done(self, wait: bool) -> bool:
        done = super().save_done(wait)
        if self.deaths:
            self.deaths -= 1
            raise WorkerFailed(Failure.death(ProcessInfo("trainer rank 1"), "killed"))
        return done


def test_a_save_that_was_written_when_a_trainer_died_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train.trainer_restarts` restarts the trainers from this checkpoint, and then calls the action that failed again."""
    recipe = Recipe()
    recipe.train.save_every, recipe.observe.tensorboard, recipe.observe.report = 1, False, False
    with RunLog(recipe, tmp_path, 1, 8) as log:
        run: Any = build(recipe, tmp_path, log, [])
        checkpoints = run.checkpoints
        checkpoints.saver = saver(tmp_path / "checkpoints", DyingTrainers())
        monkeypatch.setattr(checkpoints, "_state", lambda step, *, interrupted: {**state(), "step": step})
        with pytest.raises(WorkerFailed):
            checkpoints.save_if_due(1)
        assert checkpoints.restore_trainers() == 1
        checkpoints.save_if_due(1)
        checkpoints.resumed, checkpoints.resumed_step = tmp_path / "other" / "step_000002", 2
        checkpoints._save(2)  # at SIGTERM: another run's checkpoint of this step is not this run's
        assert checkpoints.newest() == (2, tmp_path / "other" / "step_000002")
        assert checkpoints.newest(before=2) == (0, None), "step 1 has the weights of another history"
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_000001", "step_000002"]
