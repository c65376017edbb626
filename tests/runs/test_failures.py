"""Failures on the real stack: the cause is reported within seconds, and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megarl.checkpoint.folder import checkpoint_step, list_checkpoints
from tests.support.stack import run
from tests.support.training_runs import SMALL, Run, assert_ended, descendants, pid_in_log, settings

pytestmark = pytest.mark.stack

RAYS_OWN = re.compile(r"^\*\*\* SIGTERM received|^(\[.*logging\.cc.*\] *)?(\*\*\*|PC:|    @)|^\[.*logging\.cc")


@pytest.fixture
def started(quickstart_data: Path, tmp_path: Path):
    runs = []

    def start(name: str, *more: str) -> Run:
        runs.append(Run(quickstart_data, tmp_path, name, *more))
        return runs[-1]

    yield start
    for training in runs:
        if training.process.poll() is None:
            training.process.kill()
            training.process.wait()


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_within_ten_seconds(started) -> None:
    training = started("interrupted")
    training.wait_for_steps(2)
    processes = descendants(training.process.pid)
    training.process.send_signal(signal.SIGINT)
    status, errors = training.end(10)
    assert status == 130
    assert "stopped by Ctrl-C" in errors and "Traceback" not in errors
    assert_ended(processes)


def assert_names_the_run(lines: list[str], directory: Path) -> None:
    """Assert that `lines` name the run's folder and how to resume, and nothing else."""
    folder, remedy = lines
    assert folder == f"{directory.name}: stopped; its files are in {directory}" and "train.resume=auto" in remedy


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 4, 8])
def test_sigterm_ends_a_run_during_its_start(started, seconds: int) -> None:
    """SIGTERM ends the run while Ray, the engine or the trainers start: `seconds` after Ray's first processes.

    Early in its start, Ray's C++ part handles the signal: it prints its stack (`RAYS_OWN`) and calls our handler.
    """
    training = started("starting")
    training.wait_for_processes()
    time.sleep(seconds)
    processes = descendants(training.process.pid)
    training.process.send_signal(signal.SIGTERM)
    status, errors = training.end(20)
    ours = [line for line in errors.splitlines() if line.strip() and not RAYS_OWN.search(line)]
    assert (status, ours[-1]) == (143, "stopped by SIGTERM")
    assert_names_the_run(ours[:-1], training.directory)
    assert_ended(processes)


@pytest.mark.slow
def test_sigterm_saves_and_ends_all_processes_with_a_message(started) -> None:
    """Cluster managers send SIGTERM, some to the whole process group, which must not end Ray before the save.

    Ray installs a handler that would end the process without a message.
    """
    training = started("terminated", "train.save_every=0")
    training.wait_for_steps(1)
    processes = descendants(training.process.pid)
    assert training.process.pid not in {os.getpgid(process.pid) for process in processes}
    os.killpg(training.process.pid, signal.SIGTERM)
    status, errors = training.end(30)
    first, *lines = (line for line in errors.splitlines() if line.strip())
    assert first.startswith("SIGTERM: the run ends at the next moment at which it can save a checkpoint")
    assert (status, lines[-1]) == (143, "stopped by SIGTERM")
    assert_names_the_run(lines[:-1], training.directory)
    assert list_checkpoints(training.directory / "checkpoints")
    assert json.loads((training.directory / "summary.json").read_text())["status"] == "stopped"
    assert_ended(processes)


@pytest.mark.slow
@pytest.mark.parametrize(("role", "words"), [("engine0", "engine0"), ("trainer rank 0", "trainer-0")])
def test_a_killed_process_is_named_within_seconds(started, role: str, words: str) -> None:
    training = started("killed")
    training.wait_for_steps(2)
    processes = descendants(training.process.pid)
    pid = pid_in_log(training.directory, words)
    os.kill(pid, signal.SIGKILL)
    status, errors = training.end(30)
    assert status == 1
    assert role in errors and "SIGKILL" in errors and "Traceback" not in errors
    last = list_checkpoints(training.directory / "checkpoints")[-1]
    left = f"Last intact checkpoint: step {checkpoint_step(last)}, {last}. Resume from it: the same command"
    assert errors.count(f"{left} with train.resume=auto.\n") == 1
    assert_ended(processes)


@pytest.mark.slow
@pytest.mark.parametrize(("scorer", "words"), [("raises", "no such luck"), ("not_a_number", "nan")])
def test_a_broken_reward_ends_the_run_with_its_cause(
    quickstart_data: Path, tmp_path: Path, scorer: str, words: str
) -> None:
    arguments = settings(quickstart_data, tmp_path, "reward", *SMALL, f"reward.function=tests.support.scorers:{scorer}")
    done = run("train", "recipes/quickstart.yaml", *arguments)
    assert done.returncode == 1
    assert scorer in done.stderr and words in done.stderr and "word_problems" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_the_end_of_rays_processes_is_named_within_seconds(started, name: str) -> None:
    """Ray ended the command without a word, or after a minute, and left the run's status at "running"."""
    training = started("ray")
    training.wait_for_steps(1)
    processes = descendants(training.process.pid)
    next(process for process in processes if process.name().startswith(name)).kill()
    status, errors = training.end(30)
    assert status == 1 and f"ServiceDied: Ray's {name} on " in errors and "killed by signal 9" in errors
    assert "train.resume=auto" in errors and "Last intact checkpoint" in errors
    assert json.loads((training.directory / "summary.json").read_text())["status"] == "failed"
    assert_ended(processes)
