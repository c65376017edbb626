"""`train.journal` on the real stack: a controller that is killed goes on after its last step, with the same numbers."""

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
from tests.support.training_runs import SMALL, assert_ended, metrics_so_far, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(2400)]
MORE = [*SMALL, "train.steps=12", "train.save_every=5", "evaluation.every=3"]
JOURNAL = ["train.journal=true", "train.resume=auto"]
KILLS = (2, 3, 7)  # after this many lines of metrics


def controller(run_dir: Path) -> int:
    return int(json.loads((run_dir / "run.lock").read_text())["pid"])


def kill_after(run_dir: Path, lines: int, process: subprocess.Popen[str]) -> int:
    """Kill the controller; returns its pid."""
    deadline = time.monotonic() + 900
    while not (run_dir / "metrics.jsonl").exists() or len(metrics_so_far(run_dir)) < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    pid = controller(run_dir)
    os.kill(pid, signal.SIGKILL)
    return pid


def start(arguments: list[str], torchrun: int = 0) -> subprocess.Popen[str]:
    full = command("train", "recipes/quickstart.yaml", *arguments, torchrun=torchrun)
    return subprocess.Popen(full, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


def check(run_dir: Path, whole: Path, resumes: int) -> None:
    """Check that a killed run has the numbers of a whole one, and that its resumes lost no complete step."""
    assert without_times(metrics(run_dir)) == without_times(metrics(whole))
    notices = [json.loads(line)["text"] for line in (run_dir / "notices.jsonl").read_text().splitlines()]
    resumed = [text for text in notices if text.startswith("resumed after step")]
    assert len(resumed) == resumes and not [text for text in notices if "were moved to" in text], notices
    trained = [text for text in resumed if "from the journal" in text]
    assert trained and all("with the same gradient norms" in text for text in trained), resumed
    assert not [path for path in run_dir.iterdir() if path.name in ("journal", "batches")]


def test_a_controller_that_is_killed_again_and_again(quickstart_data: Path, tmp_path: Path) -> None:
    """`train.restarts` starts it again. Exit status 0, all metrics bit-identical to a run without failures and without a journal."""
    assert train(quickstart_data, tmp_path, "whole", *MORE).returncode == 0
    run_dir = tmp_path / "killed"
    process = start(settings(quickstart_data, tmp_path, "killed", *MORE, *JOURNAL, "train.restarts=2"))
    started = []
    for lines in KILLS:
        killed = kill_after(run_dir, lines, process)
        started += psutil.Process(process.pid).children(recursive=True)
        while controller(run_dir) == killed:
            assert process.poll() is None
            time.sleep(0.1)
    _, words = process.communicate(timeout=900)
    assert process.returncode == 0, words
    assert "without a new step in the journal" in words
    assert_ended(started)
    check(run_dir, tmp_path / "whole", resumes=len(KILLS))


def test_a_controller_that_is_killed_under_torchrun(quickstart_data: Path, tmp_path: Path) -> None:
    """Rank 0 is the controller. torchrun ends, and the same command goes on."""
    assert train(quickstart_data, tmp_path, "whole", *MORE, torchrun=1).returncode == 0
    run_dir, arguments = tmp_path / "killed", settings(quickstart_data, tmp_path, "killed", *MORE, *JOURNAL)
    for lines in KILLS[:2]:
        process = start(arguments, torchrun=1)
        kill_after(run_dir, lines, process)
        process.communicate(timeout=300)
        assert process.returncode != 0
    process = start(arguments, torchrun=1)
    _, words = process.communicate(timeout=900)
    assert process.returncode == 0, words
    check(run_dir, tmp_path / "whole", resumes=2)
