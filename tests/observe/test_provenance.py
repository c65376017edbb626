"""Provenance of a run's starts: in summary.json, in checkpoints' state, and on the page of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.observe.log import RunLog
from megarl.observe.page.report import report_data, write_report
from megarl.observe.sessions import provenance_lines
from tests.support.html_page import MARKUP
from tests.support.log_recipe import make_recipe

START: dict[str, Any] = {
    "megarl": "0.1.0",
    "commit": "a" * 40,
    "changed": False,
    "code": "c0de",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "system": "Linux",
    "command": "megarl train a.yaml",
    "folder": "/here",
    "recipe": "4ec1",
    "data": "da7a",
    "weights": "3e16",
}


def run(path: Path, *starts: dict[str, Any]) -> dict[str, Any]:
    """Run one step per start and return summary.json."""
    for step, provenance in enumerate(starts, start=1):
        with RunLog(make_recipe(), path, step, len(starts), provenance=provenance) as log:
            log.add_provenance(
                {"hosts": {"node-1": {"trainers": 2}}, "devices": {"kind": "cpu", "trainers": {"cpu": 2}}}
            )
            log.begin()
            log.step(step)
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return summary


def test_each_start_has_its_provenance(tmp_path: Path) -> None:
    newer = {**START, "versions": {"python": "3.11.7", "torch": "2.14.0"}}
    first, second = run(tmp_path, START, newer)["sessions"]
    assert first["provenance"] == START | {
        "hosts": {"node-1": {"trainers": 2}},
        "devices": {"kind": "cpu", "trainers": {"cpu": 2}},
    }
    assert second["provenance"]["versions"]["torch"] == "2.14.0"


def test_the_provenance_is_there_while_the_run_lives(tmp_path: Path) -> None:
    """A run that is killed in its first step has it, too."""
    log = RunLog(make_recipe(), tmp_path, 1, 1, provenance=START)
    (session,) = json.loads((tmp_path / "summary.json").read_text())["sessions"]
    assert session["provenance"] == START
    log.close("finished")


def test_lines_of_the_report(tmp_path: Path) -> None:
    lines = dict(provenance_lines(run(tmp_path, START)["sessions"]))
    assert lines["megarl"] == "0.1.0 (commit aaaaaaaaaaaa)"
    assert lines["Versions"] == "python 3.11.7, torch 2.13.0"
    assert (lines["Hosts"], lines["Trainers' devices"]) == ("node-1: 2 trainers", "2 x cpu (cpu)")
    assert (lines["Command"], lines["Recipe's digest"]) == ("megarl train a.yaml", "4ec1")
    assert not any(label.startswith("Start") for label in lines)


def test_starts_with_other_versions_are_named(tmp_path: Path) -> None:
    older = {**START, "code": "0", "commit": None, "versions": {"python": "3.11.7", "torch": "2.12.0"}}
    lines = dict(provenance_lines(run(tmp_path, older, {}, START)["sessions"]))
    assert lines["Start 1, step 1"] == "with megarl 0.1.0, with torch 2.12.0"
    assert lines["Start 2, step 2"] == "unknown"


def test_runs_of_earlier_versions_have_a_report(tmp_path: Path) -> None:
    assert provenance_lines([]) == [] and provenance_lines([{"first_step": 1}]) == []
    summary = run(tmp_path, START)
    for session in summary["sessions"]:
        del session["provenance"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert report_data(tmp_path)["answers"]["runs/0/overview"]["provenance"] == []


def test_the_page_shows_and_escapes_it(tmp_path: Path) -> None:
    run(tmp_path, START | {"command": f"megarl train {MARKUP}"})
    page = write_report(tmp_path).read_text()
    assert '"provenance":[[' in page and "commit aaaaaaaaaaaa" in page and "node-1: 2 trainers" in page
    assert MARKUP not in page and json.dumps(MARKUP)[1:-1].replace("<", "\\u003c").replace(">", "\\u003e") in page
