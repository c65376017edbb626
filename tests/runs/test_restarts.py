"""`train.restarts` on the real stack: killed processes, and the same numbers as a run without failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megarl.observe.metrics import without_times
from tests.support.stack import ROOT, command, environment, metrics
from tests.support.training_runs import SMALL, assert_ended, metrics_so_far, pid_in_log, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 6


def wait_for_lines(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").exists() or len(metrics_so_far(run_dir)) < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_goes_on_after_deaths_of_trainer_engine_and_controller(quickstart_data: Path, tmp_path: Path) -> None:
    """Exit status 0, all metrics bit-identical to a run without failures, no process left."""
    more = [*SMALL, f"train.steps={STEPS}"]
    assert train(quickstart_data, tmp_path, "whole", *more).returncode == 0
    run_dir = tmp_path / "restarted"
    arguments = settings(quickstart_data, tmp_path, "restarted", *more, "train.restarts=2")
    process = subprocess.Popen(
        command("train", "recipes/quickstart.yaml", *arguments),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    started = []
    for steps, victim in ((1, "trainer-0"), (2, "engine0"), (4, "controller")):
        wait_for_lines(run_dir, steps, process)
        started += psutil.Process(process.pid).children(recursive=True)
        holder = json.loads((run_dir / "run.lock").read_text())["pid"]
        os.kill(holder if victim == "controller" else pid_in_log(run_dir, victim), signal.SIGKILL)
        time.sleep(2)  # until the failure is noticed: the next death is of the restarted run
        while json.loads((run_dir / "run.lock").read_text())["pid"] == holder:
            assert process.poll() is None
            time.sleep(0.1)
    _, words = process.communicate(timeout=400)
    assert process.returncode == 0, words
    assert_ended(started)
    assert without_times(metrics(run_dir)) == without_times(metrics(tmp_path / "whole"))
    notices = [json.loads(line)["text"] for line in (run_dir / "notices.jsonl").read_text().splitlines()]
    causes = [text for text in notices if text.startswith("restarted after: ")]
    assert len(causes) == 3
    for cause, name in zip(causes, ("trainer rank 0", "engine0", "the controller: "), strict=True):
        assert name in cause
