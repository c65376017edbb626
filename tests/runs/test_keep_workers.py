"""`train.keep_workers` on the real stack: trainers and engine outlive a controller that is killed, and the numbers stay the same."""

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
from tests.runs.test_journal import controller, kill_after, start
from tests.support.stack import metrics
from tests.support.training_runs import SMALL, assert_ended, metrics_so_far, pid_in_log, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(3000)]
APART = ["cluster.placement=disaggregated", "rollout.at_update=drain", "train.save_every=4", "train.resume=auto"]
RUN = [*SMALL, *APART, "train.steps=8", "evaluation.every=3"]
KEEP = ["train.journal=true", "train.restarts=2", "train.keep_workers=600"]
WORKERS = ("trainer-0", "engine0")


def notices(run_dir: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (run_dir / "notices.jsonl").read_text().splitlines()]


def wait_for_lines(run_dir: Path, count: int, process: subprocess.Popen[str]) -> float:
    """Wait for lines of metrics; returns the time."""
    while len(metrics_so_far(run_dir)) < count:
        assert process.poll() is None
        time.sleep(0.02)
    return time.monotonic()


def wait_for_controller(run_dir: Path, killed: int, process: subprocess.Popen[str]) -> None:
    """Wait for the controller after the `killed` one, which empties the file first."""
    while not (run_dir / "run.lock").read_text() or controller(run_dir) == killed:
        assert process.poll() is None
        time.sleep(0.05)


def kill_and_measure(run_dir: Path, lines: int, process: subprocess.Popen[str]) -> float:
    """Kill the controller after `lines` of metrics. Returns the seconds until the next line is there."""
    killed = kill_after(run_dir, lines, process)
    count, began = len(metrics_so_far(run_dir)), time.monotonic()
    wait_for_controller(run_dir, killed, process)
    return wait_for_lines(run_dir, count + 1, process) - began


def test_workers_outlive_their_controller(quickstart_data: Path, tmp_path: Path) -> None:
    """The controller dies twice: no worker starts again, and all metrics equal an undisturbed run's bit for bit."""
    assert train(quickstart_data, tmp_path, "whole", *RUN).returncode == 0
    run_dir = tmp_path / "killed"
    process = start(settings(quickstart_data, tmp_path, "killed", *RUN, *KEEP))
    kill_after(run_dir, 2, process)
    first = {worker: pid_in_log(run_dir, worker) for worker in WORKERS}
    started = psutil.Process(process.pid).children(recursive=True)
    seconds = [kill_and_measure(run_dir, lines, process) for lines in (3, 6)]
    started += psutil.Process(process.pid).children(recursive=True)
    _, words = process.communicate(timeout=1200)
    print(f"seconds from a death of the controller to the next step: {seconds}")
    assert process.returncode == 0, words
    assert {worker: pid_in_log(run_dir, worker) for worker in WORKERS} == first, "a worker has started again"
    assert without_times(metrics(run_dir)) == without_times(metrics(tmp_path / "whole"))
    kept = [text for text in notices(run_dir) if "have outlived the controller" in text]
    assert len(kept) == 3 and all(text.startswith("1 trainer and 1 engine have") for text in kept), notices(run_dir)
    assert_ended(started)


@pytest.mark.parametrize("controller_lives", [False, True])
def test_nothing_outlives_the_command(quickstart_data: Path, tmp_path: Path, controller_lives: bool) -> None:
    """`megarl train` is killed, without a controller or with one that saves a checkpoint first: the keeper ends all processes."""
    run_dir = tmp_path / "run"
    process = start(settings(quickstart_data, tmp_path, "run", *RUN, *KEEP, "train.steps=500"))
    killed = kill_after(run_dir, 1, process)
    if controller_lives:
        wait_for_controller(run_dir, killed, process)
        wait_for_lines(run_dir, len(metrics_so_far(run_dir)) + 1, process)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert len(started) > 3
    assert_ended(started, 20 if controller_lives else 10)
    assert not controller_lives or any("was saved before the end" in text for text in notices(run_dir))


def test_workers_end_when_their_time_is_over(quickstart_data: Path, tmp_path: Path) -> None:
    """The next controller is stopped before it attaches. Once it goes on, it starts new workers, with the same numbers."""
    assert train(quickstart_data, tmp_path, "whole", *RUN).returncode == 0
    run_dir = tmp_path / "run"
    process = start(settings(quickstart_data, tmp_path, "run", *RUN, *KEEP, "train.keep_workers=2"))
    killed = kill_after(run_dir, 2, process)
    workers = [psutil.Process(pid_in_log(run_dir, worker)) for worker in WORKERS]
    while not (children := [each for each in psutil.Process(process.pid).children() if is_controller(each, killed)]):
        time.sleep(0.02)
    os.kill(children[0].pid, signal.SIGSTOP)
    assert_ended(workers, 15)
    os.kill(children[0].pid, signal.SIGCONT)
    _, words = process.communicate(timeout=1200)
    assert process.returncode == 0, words
    assert without_times(metrics(run_dir)) == without_times(metrics(tmp_path / "whole"))


def is_controller(process: psutil.Process, killed: int) -> bool:
    if process.status() == psutil.STATUS_ZOMBIE:  # the killed one, until it is reaped
        return False
    words = process.cmdline()
    return process.pid != killed and words[1:4] == ["-m", "megarl", "train"]
