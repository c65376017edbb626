"""Advice reaches the notices, summary.json, the terminal, the report and the page of `megarl view`."""

from __future__ import annotations

import json
import os
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.next_commands import after_interruption, after_training
from megarl.observe.advice import of_run
from megarl.observe.advice.advise import advice_lines
from megarl.observe.advice.of_run import Adviser
from megarl.observe.json_lines import read_lines
from megarl.observe.log import RunLog
from megarl.observe.page.report import report_data
from megarl.observe.page.viewed_run import ViewedRun
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import sample_path
from megarl.recipe.schema import Recipe
from tests.observe.advice.histories import RL, constant, lines
from tests.observe.advice.test_faults import FAULTS
from tests.support.log_recipe import make_recipe

CLIPPED = {name: curve for name, curve in RL.items() if not name.startswith(("timing_s/", "rollout/wait_seconds/"))} | {
    "actor/pg_clipfrac": constant(0.4)
}


def advised_recipe() -> Recipe:
    made = make_recipe()
    made.name = "advised"
    return made


def write_run(path: Path, steps: int, status: str = "finished") -> Recipe:
    """Write a run whose updates are too large."""
    made = advised_recipe()
    log = RunLog(made, path, 1, steps)
    for metrics in lines(CLIPPED, steps=steps):
        step = int(metrics.pop("step"))
        log.add(metrics)
        log.step(step)
    log.close(status)
    return made


def advice_notices(path: Path) -> list[dict[str, Any]]:
    return [notice for notice in read_lines(RunDirectory(path).notices)[0] if notice["text"].startswith("advice: ")]


def test_advice_is_a_notice_once_and_a_part_of_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path, 25)
    (notice,) = advice_notices(tmp_path)
    assert notice["step"] == 11 and notice["level"] == "notice", "after the line of step 10"
    assert "a step changes the policy too much: actor/pg_clipfrac" in notice["text"]
    assert "Try actor.optimizer.lr=5e-07" in notice["text"]
    (advice,) = json.loads((tmp_path / "summary.json").read_text())["advice"]
    assert (advice["rule"], advice["kind"]) == ("update_too_large", "learning")
    assert advice["changes"] == ["actor.optimizer.lr=5e-07"] and "steps 21 to 25" in advice["evidence"]


def test_a_run_is_looked_at_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []

    def read(path: Path) -> list[dict[str, float]]:
        looked.append(path)
        return []

    monkeypatch.setattr(of_run, "read_metrics", read)
    adviser = Adviser(RunDirectory(tmp_path), Recipe(), 0)
    for step in range(1, 1001):
        adviser.after(step)
    assert len(looked) < 20, "reading all lines costs time that grows with the run"


def test_an_error_in_a_rule_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: Any) -> None:
        raise KeyError("actor/none")

    monkeypatch.setattr(of_run, "advise", broken)
    write_run(tmp_path, 12)
    (notice,) = advice_notices(tmp_path)
    assert "KeyError" in notice["text"]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


def test_the_terminal_shows_advice_at_the_end(tmp_path: Path) -> None:
    mine = write_run(tmp_path, 12)
    shown = after_training(mine, RunDirectory(tmp_path))
    place = shown.index("advice:")
    assert shown[place + 1].startswith("  a step changes the policy too much: actor/pg_clipfrac ")
    assert shown[place + 2] == "    try actor.optimizer.lr=5e-07"
    assert "advice:" in after_interruption(mine, RunDirectory(tmp_path))
    assert advice_lines([]) == []


def test_report_and_page_show_the_same(tmp_path: Path) -> None:
    write_run(tmp_path, 12)
    (advice,) = ViewedRun(0, tmp_path, "advised").overview()["advice"]
    assert advice["rule"] == "update_too_large"
    assert report_data(tmp_path)["answers"]["runs/0/overview"]["advice"] == [advice]


def test_of_large_files_the_first_samples_are_read(tmp_path: Path) -> None:
    """The page opens at once, and the rules about samples still have some."""
    run = RunDirectory(tmp_path)
    run.samples.mkdir(parents=True)
    records = [{"group": number, "response": "x" * 1000} for number in range(2000)]
    for step in range(1, 5):
        path = sample_path(run, step)
        path.write_text("".join(json.dumps({**record, "step": step}) + "\n" for record in records))
    read = of_run.newest_samples(run)
    assert {record["step"] for record in read} == {2, 3, 4}
    assert 3 * 250 < len(read) < 3 * 350 and read[0] == {**records[0], "step": 2}


def test_the_page_names_who_is_silent(tmp_path: Path) -> None:
    with RunLog(advised_recipe(), tmp_path, 1, 30) as log:
        for step in range(1, 4):
            log.step(step)
        with log.phase("gen"):
            pass
        run = ViewedRun(0, tmp_path, "advised")
        assert run.overview()["advice"] == [] and run.state()["silent_minutes"] == 0
        for file in ("metrics.jsonl", "notices.jsonl", "trace.json", "summary.json"):
            os.utime(tmp_path / file, (time.time() - 200, time.time() - 200))
        assert run.state()["silent_minutes"] == 3, "the page asks again, although no file has changed"
        (advice,) = run.overview()["advice"]
        assert advice["rule"] == "silent" and "the trainers compute" in advice["what"]
    assert run.overview()["advice"] == [], "the run has ended"


def test_the_page_has_the_metrics_of_every_fault() -> None:
    names = {name for fault in FAULTS.values() for name in {**fault.base, **fault.curves}}
    names |= {fault.evaluations[0] for fault in FAULTS.values() if fault.evaluations}
    assert [name for name in sorted(names) if not any(fnmatchcase(name, pattern) for pattern in of_run.METRICS)] == []


def test_a_running_run_is_judged_without_the_steps_of_deaths(tmp_path: Path) -> None:
    """The log's advice reads the notices of the run."""
    recipe, slow = advised_recipe(), {**RL, "timing_s/weight_sync": constant(4), "timing_s/step": constant(118)}
    run_dir = RunDirectory(tmp_path)
    history = lines(slow, steps=20)
    for line in history:
        if line["step"] in (5, 6):
            line["timing_s/weight_sync"] = line["timing_s/step"] = 2000.0
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in history))
    assert any("weight sync takes long" in text for text in Adviser(run_dir, recipe, 0).after(20))
    deaths = [{"time": 1.0, "step": step, "level": "notice", "event": "death", "text": "killed"} for step in (5, 6)]
    run_dir.notices.write_text("".join(json.dumps(notice) + "\n" for notice in deaths))
    assert not any("weight sync takes long" in text for text in Adviser(run_dir, recipe, 0).after(20))
