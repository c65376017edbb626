"""The recorded outcome of a command: a failure of the planner or of megarl is neither a verdict nor a refusal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from docs.generate import rehearsals
from docs.generate.rehearsed import Outcome
from megarl.commands.rehearse.command import RECORD


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [(0, "a plan", "passes"), (1, "a plan", "does not fit"), (1, "", "failed"), (2, "", "refused")],
)
def test_a_plan_without_output_has_failed(
    status: int, output: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], status, output, "the error")
    monkeypatch.setattr(rehearsals, "_megarl", lambda *arguments: done)
    assert rehearsals.plan(Path("recipe.yaml"), Outcome("")).plan.startswith(f"{verdict}, ")


@pytest.mark.parametrize(
    ("status", "started", "outcome"),
    [(0, True, "passed"), (1, True, "failed"), (2, True, "failed"), (2, False, "refused"), (1, False, "failed")],
)
def test_only_a_rehearsal_that_did_not_start_is_refused(
    status: int, started: bool, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: str, recipe: str, option: str, out: str) -> subprocess.CompletedProcess[str]:
        if started:
            Path(out).mkdir()
            Path(out, RECORD).write_text(json.dumps({"changes": [{"outcome": "kept"}]}))
        return subprocess.CompletedProcess([], status, "", "the error")

    monkeypatch.setattr(rehearsals, "_megarl", run)
    recorded = rehearsals.rehearse(Path("recipe.yaml"), Outcome(""))
    assert (recorded.rehearsal, recorded.kept) == (outcome, int(started))
