"""Phases, waits and the timeline of a run's page: their seconds do not depend on how curves are thinned."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.log import RunLog
from megarl.observe.page.facts import timeline
from megarl.observe.page.report import report_data
from megarl.observe.page.viewed_run import ViewedRun
from megarl.recipe.schema import Recipe

STEPS, EVERY = 5000, 100  # a checkpoint every 100 steps


def write_long_run(path: Path) -> None:
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            saves = step % EVERY == 0
            line: dict[str, Any] = {"step": step, "timing_s/step": 330.0 if saves else 30.0, "timing_s/gen": step % 5}
            line["rollout/engines_idle"] = 0.75 if step > STEPS - 20 else 0.25
            file.write(json.dumps(line | ({"timing_s/save": 300.0} if saves else {})) + "\n")


def test_waits_of_a_long_run_are_means_over_its_steps(tmp_path: Path) -> None:
    """The view thins curves of over 4,000 steps and the report of over 600; a checkpoint's curve is short and stays whole."""
    write_long_run(tmp_path)
    waits = ViewedRun(0, tmp_path, "").phases()["waits"]
    assert waits == report_data(tmp_path)["answers"]["runs/0/phases"]["waits"]
    rows = {row["text"]: (row["recent"], row["all"]) for row in waits["rows"]}
    assert waits["steps"] == 20 and len(rows) == 3
    recent, whole = rows["Trainers wait for a checkpoint"]
    assert whole == {"seconds": 3.0, "share": pytest.approx(3 / 33, rel=1e-5)}
    assert recent == {"seconds": 15.0, "share": pytest.approx(300 / (19 * 30 + 330), rel=1e-5)}, "step 5,000 saves"
    recent, whole = rows["Trainers wait for a batch, in total"]
    assert (whole["seconds"], recent["seconds"]) == (2.0, 2.0) and whole["share"] == pytest.approx(2 / 33, rel=1e-5)
    recent, whole = rows["Engines without a group (rollout.max_staleness, loading, the end)"]
    assert recent == {"seconds": None, "share": 0.75} and whole == {"seconds": None, "share": 0.252}


def test_before_the_first_step_there_are_no_waits(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/pass@1": 0.5, "timing_s/eval": 3.0}\n')
    assert ViewedRun(0, tmp_path, "").phases()["waits"] == {"steps": 0, "rows": []}


def test_training_inside_a_recovery_stays_a_phase_of_its_own(tmp_path: Path) -> None:
    """After a restart of trainers or a resume with the journal, a recovery trains again."""
    recipe = Recipe()
    recipe.observe.console, recipe.observe.tensorboard, recipe.observe.report = "plain", False, False
    with RunLog(recipe, tmp_path, 1, 3) as log:
        for step in range(1, 4):
            if step == 2:
                with log.phase("recovery"), log.phase("update_actor"):
                    time.sleep(0.01)
            with log.phase("gen"), log.phase("reward"):
                time.sleep(0.01)
            with log.phase("update_actor"):
                time.sleep(0.01)
            log.call("reward", "scorer0", "calls", time.time(), 0.01)
            log.step(step)
    phases = ViewedRun(0, tmp_path, "").phases()["phases"]
    assert set(phases["names"]) == {"gen", "recovery", "update_actor", "other"}, "rewards run inside gen only"
    assert phases["seconds"]["update_actor"][0] >= 0.01


def span(step: int, second: float, process: str = "controller") -> dict[str, Any]:
    place = {"process": process, "thread": "calls", "name": "gen"}
    return {**place, "ts": second * 1e6, "dur": 5e5, "args": {"step": step}}


@pytest.mark.parametrize("first", [2, 3])
def test_steps_repeated_after_a_resume_are_drawn_once(first: int) -> None:
    """A resume may begin at the step at which the run was killed."""
    killed = [span(1, 0), span(2, 1), span(3, 2), span(3, 2.2, "engine0")]
    resumed = [span(step, 900 + step) for step in range(first, 5)] + [span(3, 903.2, "engine0")]
    sessions = [{"began": 0.0}, {"began": 800.0}]
    drawn = timeline([*killed, *resumed], sessions)
    assert drawn == timeline(resumed, []) and drawn["steps"] == [first, 4]
    assert timeline(killed, sessions[:1])["steps"] == [1, 3]
    assert timeline(killed, sessions)["steps"] == [1, 3], "the last session has no spans yet"


def test_steps_repeated_within_a_session_are_drawn_once() -> None:
    """A rollback or a restart of trainers goes back to an earlier step."""
    repeated = [span(2, 3), span(3, 4)]
    assert timeline([span(1, 0), span(2, 1), span(3, 2), *repeated], [{"began": 0.0}]) == timeline(repeated, [])
