"""Effective training time and faults, against sessions worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.observe.json_lines import read_lines
from megarl.observe.log import RunLog
from megarl.observe.metrics import read_metrics, without_times
from megarl.observe.page.report import report_data
from megarl.observe.restarts import AFTER
from megarl.observe.sessions import effective_time, faults, read_sessions, time_lines
from tests.support.log_recipe import make_recipe


def session(began: float, status: str, start: float | None = None, **more: object) -> dict[str, object]:
    seconds = {} if start is None else {"start": {"seconds": start}}
    return {"first_step": 1, "began": began, "status": status, **seconds, **more}


def line(step: int, seconds: float, **more: float) -> dict[str, float]:
    return {"step": step, "timing_s/step": seconds, **more}


def test_a_run_without_faults_loses_its_start() -> None:
    time = effective_time([session(100, "finished", 20, ended=200)], [line(0, 10), line(1, 30), line(2, 40)], [], 999)
    assert time == {
        "ratio": 0.8,
        "wall": 100,
        "productive": 80,
        "start": 20,
        "repeated": 0,
        "recovery": 0,
        "dropped": 0,
        "other": 0,
    }


def test_restarts_repeated_steps_and_recovery_are_lost() -> None:
    """Session 1 is killed in step 4, after a checkpoint of step 2; 2 fails in its start; 3 repeats step 3 and runs on."""
    sessions = [
        session(1000, "killed", 50),  # steps 1 to 3 until 1350, 40 s of step 4, 10 s until the next session
        session(1400, "failed", ended=1430),
        session(1440, "running", 60),  # step 3 from 1500 to 1600, step 4 to 1750
    ]
    kept = [
        line(1, 100),
        line(2, 100),
        line(3, 100),
        line(4, 150, **{"fleet/restart_seconds": 10.0, "timing_s/recovery": 20.0}),
    ]
    discarded = [line(3, 100), line(3, 100)]  # a crash while lines were moved writes them twice
    time = effective_time(sessions, kept, discarded, 1750)
    assert time == {
        "ratio": pytest.approx(420 / 750),
        "wall": 750,
        "productive": 420,
        "start": 50 + 30 + 60,
        "repeated": 100,
        "recovery": 30,
        "dropped": 0,
        "other": 40 + 10 + 10,
    }


def test_a_run_that_has_just_begun_has_no_ratio() -> None:
    assert effective_time([session(5, "running")], [], [], 5)["ratio"] is None
    assert effective_time([session(5, "running")], [], [], 4)["ratio"] is None, "the clock was set back"
    assert effective_time([session(0, "running")], [line(1, 3)], [], 2)["ratio"] == 1.0, "clocks differ"


def test_steps_that_a_rollback_undid_are_lost() -> None:
    """The rollback after step 4 undoes steps 3 and 4, and takes 5 s."""
    kept = [
        line(1, 10),
        line(2, 10),
        line(3, 20),
        line(4, 25, **{"recovery/dropped_steps": 2.0, "timing_s/recovery": 5.0}),
        line(5, 10),
    ]
    time = effective_time([session(0, "finished", 10, ended=100)], kept, [], 999)
    assert (time["productive"], time["dropped"], time["recovery"], time["other"]) == (30, 40, 5, 15)


def test_run_ettr_leaves_out_dropped_steps(tmp_path: Path) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 3) as log:
        log.begin()
        for step in (1, 2, 3):
            log.add({"recovery/dropped_steps": 2.0} if step == 2 else {})
            log.step(step)
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert first["run/ettr"] > 0 and second["run/ettr"] == 0 and third["run/ettr"] > 0


def test_faults_are_failures_kills_and_deaths_of_engines() -> None:
    sessions = [
        session(10, "killed", error="the controller: killed by signal 9"),
        session(40, "failed", ended=80, last_step=7, error="RuntimeError: no\nmore lines"),
        session(90, "stopped", ended=95, error="terminated from outside"),
        session(96, "killed"),
    ]
    notes = [
        {"time": 60, "step": 5, "level": "notice", "event": "death", "text": "engine1 died: killed\n1 engine left"},
        {"time": 61, "step": 5, "level": "warning", "event": "update", "text": "skipped"},
        {"time": 62, "step": 5, "level": "notice", "text": "engine1 restarts"},
        {"time": 63, "step": 6, "level": "warning", "event": "rollback", "text": "step 6: 3 spikes"},
    ]
    assert [tuple(fault.values()) for fault in faults(sessions, notes)] == [
        (40, None, "killed", "the controller: killed by signal 9"),
        (60, 5, "death", "engine1 died: killed"),
        (63, 6, "rollback", "step 6: 3 spikes"),
        (80, 7, "failure", "RuntimeError: no"),
        (None, None, "killed", None),
    ]


def test_the_lines_of_the_console() -> None:
    time = {
        "ratio": 0.941,
        "wall": 10931.0,
        "start": 250.0,
        "repeated": 0.0,
        "recovery": 0.4,
        "dropped": 75.0,
        "other": 395.2,
    }
    events = [
        {"time": 1, "step": 1, "event": event, "cause": cause}
        for event, cause in (("death", "engine1 died"), ("failure", "trainer 0 died"), ("death", "engine2 died"), ("killed", None))
    ]  # fmt: skip
    assert time_lines({"ettr": time, "faults": []}) == [
        ("time", "94.1 % of 3:02:11 in steps (ETTR); start 4:10, dropped steps 1:15, other 6:35")
    ]
    assert time_lines({"ettr": time, "faults": events})[1] == (
        "faults",
        "1 failure, 1 kill, 2 deaths; the last: engine2 died",
    )
    assert time_lines({"ettr": {"ratio": None}, "faults": []}) == []


def test_a_killed_session_has_the_cause_of_the_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AFTER, raising=False)
    assert read_sessions(tmp_path / "summary.json", "") == []
    (tmp_path / "summary.json").write_text(json.dumps({"sessions": [session(1, "running"), session(2, "running")]}))
    before, last = read_sessions(tmp_path / "summary.json", "killed by signal 9")
    assert (before["status"], before["error"]) == ("killed", None)
    assert (last["status"], last["error"]) == ("killed", "killed by signal 9")


def test_a_run_that_was_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summary, metrics and report of a real log: the time of the killed session counts, and its repeated step does not."""
    monkeypatch.delenv(AFTER, raising=False)
    log = RunLog(make_recipe(), tmp_path, 1, 3)
    log.begin()
    log.notice("engine1 died: killed\n1 engine left", "death")
    for step in (1, 2):
        log.step(step)
    log.run_dir.unlock()  # like a kill: no file is closed
    overview = report_data(tmp_path)["answers"]["runs/0/overview"]
    assert overview["status"]["name"] == "killed"
    assert [fault["event"] for fault in overview["faults"]] == ["death", "killed"]
    monkeypatch.setenv(AFTER, "the controller: killed by signal 9")
    with RunLog(make_recipe(), tmp_path, 2, 3) as log:
        log.begin()
        for step in (2, 3):
            log.step(step)
    lines, discarded = read_metrics(tmp_path / "metrics.jsonl"), read_lines(tmp_path / "metrics.discarded.jsonl")[0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    time = summary["ettr"]
    assert time["productive"] == pytest.approx(sum(line["timing_s/step"] for line in lines))
    assert time["repeated"] == pytest.approx(discarded[0]["timing_s/step"]) and time["start"] > 0
    assert time["wall"] == summary["sessions"][1]["ended"] - summary["sessions"][0]["began"]
    assert 0 < lines[0]["run/ettr"] <= 1 and lines[-1]["run/ettr"] == pytest.approx(time["ratio"], rel=0.5)
    assert "run/ettr" not in without_times(lines)[0]
    assert [(fault["event"], fault["cause"]) for fault in summary["faults"]] == [
        ("death", "engine1 died: killed"),
        ("killed", "the controller: killed by signal 9"),
    ]
    answers = report_data(tmp_path)["answers"]
    overview = answers["runs/0/overview"]
    assert "Effective time" in dict(overview["facts"]) and answers["charts"]["resumes"] == {0: [2]}
    assert overview["status"]["name"] == "finished"
    assert [fault["event"] for fault in overview["faults"]] == ["death", "killed"]
