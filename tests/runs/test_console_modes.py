"""What real runs print on stdout with --quiet and --json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.stack import command, environment, metrics
from tests.support.training_runs import SMALL, settings

pytestmark = pytest.mark.stack

CHATTER = """
import os
import sys

print("chatter of a library")
sys.stdout.flush()
os.system("echo chatter of a child process")
"""
"""A module that the recipe names: code of a user that prints while it is imported."""


@pytest.fixture
def chatty(tmp_path: Path) -> list[str]:
    (tmp_path / "chatty.py").write_text(CHATTER)
    return ["algorithm.modules=[chatty]"]


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**environment(), "PYTHONPATH": f"{folder}:{Path.cwd()}"}
    return subprocess.run(
        command("train", *arguments), cwd=Path.cwd(), env=environ, capture_output=True, text=True, timeout=400
    )


@pytest.mark.slow
def test_json_prints_events_alone(quickstart_data: Path, tmp_path: Path, chatty: list[str]) -> None:
    more = [*SMALL, *chatty, "train.steps=2", "evaluation.every=2", "evaluation.limit=4"]
    done = train(tmp_path, "recipes/quickstart.yaml", *settings(quickstart_data, tmp_path, "events", *more), "--json")
    assert done.returncode == 0, done.stderr
    assert "chatter of a library" in done.stderr and "chatter of a child process" in done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("checkpoint") == 2 and kinds.count("eval") == 1
    steps = [event for event in events if event["event"] == "step"]
    run = tmp_path / "events"
    assert [{"step": event["step"], **event["metrics"]} for event in steps] == metrics(run)
    end = events[-1]
    assert end["status"] == "finished" and Path(end["checkpoint"]) == run / "checkpoints" / "step_000002"
    assert Path(end["report"]).is_file() and Path(end["model"]) == run / "hf"


@pytest.mark.slow
def test_quiet_prints_the_end(quickstart_data: Path, tmp_path: Path, chatty: list[str]) -> None:
    more = [*SMALL, *chatty, "train.steps=1", "train.export_at_end=false"]
    done = train(tmp_path, "recipes/quickstart.yaml", *settings(quickstart_data, tmp_path, "quiet", *more), "--quiet")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("WARNING: ")]
    assert lines[0].startswith("step 1/1 | ") and lines[1] == "quiet: finished", done.stdout


def test_json_of_a_wrong_recipe_prints_nothing_on_stdout(tmp_path: Path) -> None:
    done = train(tmp_path, "recipes/quickstart.yaml", "train.step=3", "--json")
    assert done.returncode == 2 and done.stdout == "" and "train.steps" in done.stderr
