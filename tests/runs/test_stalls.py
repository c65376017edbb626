"""A trainer that hangs in user code, on the real stack: the doctor shows it while the run hangs, and the run ends with its place."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.stack import run
from tests.support.training_runs import Run, assert_ended, descendants

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
HANGING = [
    "cluster.trainers=2",
    "megatron.expert_parallel=2",
    "algorithm.modules=[tests.support.planted_loss]",
    "algorithm.loss=sleeps_later",
    "algorithm.clip_high=0.2",
    "cluster.stall=60",
]


@pytest.fixture
def training(quickstart_data: Path, tmp_path: Path):
    training = Run(quickstart_data, tmp_path, "hanging", *HANGING)
    yield training
    if training.process.poll() is None:
        training.process.kill()
        training.process.wait()


def test_a_trainer_that_hangs_is_shown_and_ends_the_run(training: Run) -> None:
    shown = wait_for_the_hang(training)
    processes = descendants(training.process.pid)
    controller, trainers, engine = (
        shown.index(next(line for line in shown if line.startswith(words)))
        for words in ("controller on ", "trainer processes (2): update_actor, for ", "service engine0 on ")
    )
    assert controller < trainers < engine
    assert any(re.search(r"megarl/step.py:\d+ update_actor$", line) for line in shown[controller:trainers])
    assert any("megarl/engines/loop.py" in line for line in shown[engine:])
    assert_names_the_sleeper([line.removeprefix("  ") for line in shown[trainers + 1 : engine]])
    status, errors = training.end(200)
    assert status == 1
    message = (
        r"TrainersStalled: trainer rank 1 on .* failed: others wait for it in update_actor, where nothing has changed"
    )
    assert re.search(message, errors)
    assert_names_the_sleeper(errors[errors.index("waiting for others:") :].splitlines())
    assert_ended(processes)


def wait_for_the_hang(training: Run) -> list[str]:
    """Ask the doctor until a rank waits for the other one; returns its lines."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert training.process.poll() is None, training.process.communicate()[1]
        done = run("doctor", str(training.directory)) if training.directory.is_dir() else None
        if done is not None and "others wait for:" in done.stdout and "planted_loss.py" in done.stdout:
            return done.stdout.splitlines()
        time.sleep(2)
    raise AssertionError("the run does not hang")


def assert_names_the_sleeper(lines: list[str]) -> None:
    waiting = lines[lines.index("waiting for others:") + 1]
    assert re.fullmatch(r"  rank 0: \w+ in the .* group \(ranks 0-1\).*", waiting)
    missing = lines[lines.index("others wait for:") + 1 :]
    assert re.match(r"  trainer rank 1 on \S+ \(pid \d+\): 1 collective behind in the .* group", missing[0])
    assert re.fullmatch(r"    .*tests/support/planted_loss.py:\d+ sleeps_later", missing[1])
