"""The quiet console, events for programs, and stdout that only they use."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from megarl.cli import app
from megarl.observe.console import ConsoleStream, make_console
from megarl.observe.log import RunLog
from tests.support.log_recipe import make_recipe


def events(text: str) -> list[dict[str, Any]]:
    """Parse each line as strict JSON, which has no NaN and Infinity."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def run_of_two_steps(folder: Path, console: str, **observe: Any) -> None:
    with RunLog(make_recipe(console=console, **observe), folder, 1, 2) as log:
        log.reached("trainers have the model")
        log.notice("a notice")
        log.evaluation(0, {"greedy": 0.25})
        log.add({"critic/rewards/mean": 0.5})
        log.step(1)
        log.warn("a warning")
        log.add({"critic/rewards/mean": math.nan})
        log.checkpoint(2, folder / "checkpoints" / "step_000002")
        log.evaluation(2, {"greedy": 0.75})
        log.step(2)


def test_quiet_prints_warnings_and_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of_two_steps(tmp_path, "quiet")
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "WARNING: a warning" and second.startswith("WARNING: critic/rewards/mean is nan at step 2")
    assert last.startswith("step 2/2 | eval/greedy 0.750 | reward nan")


def test_quiet_without_a_step_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), RunLog(make_recipe(console="quiet"), tmp_path, 1, 2) as log:
        log.notice("a notice")
        raise RuntimeError
    assert capsys.readouterr().out == ""


def test_events_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of_two_steps(tmp_path, "json", report=True)
    shown = events(capsys.readouterr().out)
    kinds = [(event["event"], event.get("step")) for event in shown]
    assert kinds == [
        ("start", None), ("progress", None), ("notice", None), ("step", 0), ("eval", 0), ("step", 1), ("notice", None),
        ("checkpoint", 2), ("eval", 2), ("notice", None), ("step", 2), ("end", None),
    ]  # fmt: skip
    assert {event["run"] for event in shown} == {make_recipe().name}
    times = [event["time"] for event in shown]
    assert times == sorted(times)
    start, end, second = shown[0], shown[-1], shown[-2]
    assert (start["first_step"], start["total_steps"], start["directory"]) == (1, 2, str(tmp_path))
    assert shown[2]["level"] == "notice" and shown[6] == {**shown[6], "level": "warning", "text": "a warning"}
    assert second["metrics"]["critic/rewards/mean"] == "NaN" and second["metrics"]["eval/greedy"] == 0.75
    assert "timing_s/step" in second["metrics"]
    assert shown[8]["metrics"] == {"eval/greedy": 0.75}
    checkpoint = str(tmp_path / "checkpoints" / "step_000002")
    assert end == {
        "event": "end", "time": end["time"], "run": start["run"], "status": "finished", "error": None, "last_step": 2,
        "directory": str(tmp_path), "report": str(tmp_path / "report.html"), "checkpoint": checkpoint, "model": None,
    }  # fmt: skip


def test_the_last_event_of_a_failed_run_has_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), RunLog(make_recipe(console="json"), tmp_path, 1, 2) as log:
        log.step(1)
        raise RuntimeError("a \ud800\nfault")
    end = events(capsys.readouterr().out)[-1]
    assert (end["event"], end["status"], end["error"]) == ("end", "failed", "RuntimeError: a \ud800\nfault")
    assert end["last_step"] == 1 and end["checkpoint"] is None and end["report"] is None


def test_a_restarted_run_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setenv("MEGARL_RESTARTED_AFTER", "trainer 1 was killed")
    make_console(make_recipe(console="json"), 4, 9, ConsoleStream(stream))
    (start,) = events(stream.getvalue())
    assert start["first_step"] == 5 and start["restarted_after"] == "trainer 1 was killed"


PRINTS = """
import os, subprocess, sys
from megarl.observe.stdout import kept_stdout, output
with kept_stdout() as kept:
    print("Python's print")
    os.write(1, b"native code\\n")
    subprocess.run(["echo", "a child process"], check=True)
    assert output() is kept
    print("an event", file=output(), flush=True)
print("after the block")
assert output() is sys.stdout
"""


def test_stdout_is_kept_for_the_output_of_the_command() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", PRINTS], env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "an event\nafter the block\n", done.stderr
    assert set(done.stderr.splitlines()) == {"Python's print", "native code", "a child process"}


def test_quiet_and_json_exclude_each_other() -> None:
    with pytest.raises(typer.BadParameter, match="--quiet and --json exclude each other"):
        app(["train", "recipes/quickstart.yaml", "--quiet", "--json"], standalone_mode=False)


@pytest.mark.parametrize(("flag", "console"), [("--quiet", "quiet"), ("--json", "json")])
def test_the_flags_are_settings(flag: str, console: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that restarts a run passes its settings to the child."""
    received: list[list[str]] = []

    def record(path: Path, overrides: list[str], *, debug: bool) -> int:
        received.append(list(overrides))
        return 0

    monkeypatch.setattr("megarl.commands.train_with_restarts.run_train_command", record)
    app(["train", "recipes/quickstart.yaml", "train.steps=3", flag], standalone_mode=False)
    assert received == [["train.steps=3", f"observe.console={console}"]]
