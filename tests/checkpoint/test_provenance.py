"""A checkpoint has the provenance of the start that wrote it; checkpoints of earlier versions have none."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.checkpoint.identity import saved_provenance
from megarl.observe.log import RunLog
from megarl.recipe.schema import Recipe
from tests.test_train import build


def test_the_state_has_the_provenance(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.train.steps, recipe.observe.console = 8, "plain"
    recipe.observe.tensorboard = recipe.observe.report = False
    with RunLog(recipe, tmp_path, 1, 8, provenance={"code": "c0de"}) as log:
        log.add_provenance({"hosts": {"node-1": {"trainers": 1}}})
        checkpoints = build(recipe, tmp_path, log, []).checkpoints
        checkpoints.save_if_due(8)
    state = checkpoints.saver.state  # type: ignore[attr-defined]
    assert state["provenance"] == {"code": "c0de", "hosts": {"node-1": {"trainers": 1}}}


def test_reading_it(tmp_path: Path) -> None:
    (tmp_path / "controller.json").write_text(json.dumps({"identity": {}, "provenance": {"code": "c0de"}}))
    assert saved_provenance(tmp_path) == {"code": "c0de"}
    (tmp_path / "controller.json").write_text(json.dumps({"identity": {}}))
    assert saved_provenance(tmp_path) == {}
