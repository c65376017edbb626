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
from tests.support.webhook_receiver import TOKEN, Receiver

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 6


def wait_for_lines(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").exists() or len(metrics_so_far(run_dir)) < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_goes_on_after_deaths_of_trainer_engine_and_controller(quickstart_data: Path, tmp_path: Path) -> None:
    """Exit status 0, all metrics bit-identical to a run without failures, no process left, an alert of each restart."""
    more = [*SMALL, f"train.steps={STEPS}"]
    assert train(quickstart_data, tmp_path, "whole", *more).returncode == 0
    run_dir = tmp_path / "restarted"
    alerts = ["observe.alerts.url=TEST_ALERT_URL", "observe.alerts.events=[start,restart,end]"]
    arguments = settings(quickstart_data, tmp_path, "restarted", *more, "train.restarts=2", *alerts)
    with Receiver() as receiver:
        kill_and_finish(run_dir, arguments, receiver.url)
    assert without_times(metrics(run_dir)) == without_times(metrics(tmp_path / "whole"))
    notices = [json.loads(line)["text"] for line in (run_dir / "notices.jsonl").read_text().splitlines()]
    causes = [text for text in notices if text.startswith("restarted after: ")]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert len(causes) == len(summary["faults"]) == 3
    assert receiver.events == [*["start", "restart"] * 3, "start", "end"]
    sent = [message["cause"] for message in receiver.messages if message["event"] == "restart"]
    for name, *texts in zip(("trainer rank 0", "engine0", "the controller: "), causes, sent, strict=True):
        assert all(name in text for text in texts)
    assert [fault["event"] for fault in summary["faults"]] == ["failure", "failure", "killed"]
    time = summary["ettr"]
    assert 0 < time["ratio"] < 1 and time["repeated"] >= 0 and time["start"] > 0
    files = [path for path in run_dir.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def kill_and_finish(run_dir: Path, arguments: list[str], webhook: str) -> None:
    """Start a run, kill a trainer, an engine and the controller, and wait for its end."""
    process = subprocess.Popen(
        command("train", "recipes/quickstart.yaml", *arguments),
        cwd=ROOT,
        env={**environment(), "TEST_ALERT_URL": webhook},
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
    assert process.returncode == 0 and TOKEN not in words, words
    assert_ended(started)
