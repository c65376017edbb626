"""Runs with requests in flight, repeated by their tapes: every metric is bitwise equal."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megarl.observe.metrics import without_times
from tests.support.stack import ROOT, command, environment, metrics, run
from tests.support.training_runs import assert_ended, descendants, settings, train

pytestmark = pytest.mark.stack

# Two engines, three batches under way: requests of up to 48 tokens meet updates.
IN_FLIGHT = [
    "cluster.trainers=1",
    "megatron.expert_parallel=1",
    "cluster.placement=disaggregated",
    "rollout.engines=2",
    "rollout.max_staleness=2",
    "rollout.max_response_length=48",
    "rollout.engine_args.max_num_seqs=8",
    "evaluation.at_start=false",
    "evaluation.every=3",
    "actor.optimizer.lr=1e-2",
    "train.save_every=2",
    "train.stop_after_skipped=0",  # at this learning rate, all samples of a group may soon have equal rewards
]


def recorded(data: Path, runs: Path, *more: str) -> Path:
    done = train(data, runs, "recorded", *IN_FLIGHT, *more)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(runs / "recorded")
    if "rollout.at_update=finish" in more:
        assert max(line["rollout/engines_behind"] for line in lines) > 0, (
            "all engines had the newest weights in each step"
        )
    else:
        assert max(line.get("rollout/spans_mean", 1) for line in lines) > 1, "no update met a running request"
    return runs / "recorded"


def replay(run_directory: Path, *more: str, starts: int = 1) -> subprocess.CompletedProcess[str]:
    """Replay a run that was started this many times."""
    return run("replay", str(run_directory), *more, timeout=300 + 100 * starts)


def assert_repeats(run_directory: Path, starts: int = 1) -> None:
    done = replay(run_directory, starts=starts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise equal" in done.stdout
    again = run_directory.with_name(f"{run_directory.name}-replay")
    assert without_times(metrics(again)) == without_times(metrics(run_directory))


@pytest.mark.slow
def test_a_replay_is_bit_equal(quickstart_data: Path, tmp_path: Path) -> None:
    # 8 steps: an update must meet a running request, which depends on the machine's load.
    assert_repeats(recorded(quickstart_data, tmp_path, "train.steps=8", "rollout.at_update=refresh"))


@pytest.mark.slow
def test_a_replay_of_colocated_engines_is_bit_equal(quickstart_data: Path, tmp_path: Path) -> None:
    """Engines pause while trainers compute; the replay pauses them at the same steps."""
    assert_repeats(recorded(quickstart_data, tmp_path, "train.steps=8", "cluster.placement=colocated"))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["finish", "refresh", "keep"])
def test_a_replay_of_30_steps_is_bit_equal(quickstart_data: Path, tmp_path: Path, rule: str) -> None:
    assert_repeats(recorded(quickstart_data, tmp_path, "train.steps=30", f"rollout.at_update={rule}"))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["raises_later", "nan_later"])
def test_a_bundle_of_a_failed_step_fails_alike_elsewhere(quickstart_data: Path, tmp_path: Path, loss: str) -> None:
    """The loss raises, or is not finite so that the run ends. The recorded run is not there when the bundle is replayed."""
    planted = [
        f"algorithm.loss={loss}",
        "algorithm.clip_high=0.2",
        "algorithm.modules=[tests.support.planted_loss]",
        "train.stop_after_skipped=1",
    ]
    rule = ["rollout.at_update=finish", "evaluation.every=0", "evaluation.at_end=false", "train.steps=30"]
    done = train(quickstart_data, tmp_path, "recorded", *IN_FLIGHT, *rule, *planted)
    message = "planted failure" if loss == "raises_later" else "nothing was learned"
    assert done.returncode == 1 and message in done.stderr, done.stderr
    recorded, file = tmp_path / "recorded", tmp_path / "step.tar"
    packed = replay(recorded, "--bundle", str(file))
    assert packed.returncode == 0 and "its failure" in packed.stdout, packed.stdout + packed.stderr
    recorded.rename(tmp_path / "gone")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = replay(file.rename(elsewhere / "failed.tar"))
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.search(rf"step \d+ fails as in the recorded run: .*{message}", again.stdout, re.DOTALL)
    lines, steps = metrics(elsewhere / "failed" / "replay"), metrics(tmp_path / "gone")
    assert len(lines) == len(steps) > 1 and without_times(lines) == without_times(steps)


KILLS = 10


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("train", "recipes/quickstart.yaml", *arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill_at(process: subprocess.Popen[bytes], run_directory: Path, steps: int, seconds: float) -> None:
    """Kill a run and wait until its processes have ended, `seconds` after it has written `steps` more lines."""
    lines = run_directory / "metrics.jsonl"
    before = len(lines.read_text().splitlines()) if lines.exists() else 0
    deadline = time.monotonic() + 600  # ten times what a start takes on an idle machine
    while not lines.exists() or len(lines.read_text().splitlines()) < before + steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(seconds)
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert_ended(started, seconds=60)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_continued_partial_samples_repeats(quickstart_data: Path, tmp_path: Path) -> None:
    """Killed until a start continues samples of unfinished groups. All starts repeat: the copies and what follows them.

    A checkpoint has such samples if they are in flight at that moment, which depends on the machine's speed.
    """
    arguments = settings(quickstart_data, tmp_path, "recorded", *IN_FLIGHT, "train.steps=24", "train.resume=auto")
    directory = tmp_path / "recorded"
    starts = 0
    while starts == 0 or not any(line.get("rollout/tokens_taken_over") for line in metrics(directory)):
        assert starts < 6, "no start has continued a sample"
        kill_at(start(arguments), directory, steps=3, seconds=0.5)
        starts += 1
    assert start(arguments).wait(600) == 0
    assert_repeats(directory, starts=starts + 1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_run_that_was_killed_repeats_from_its_tapes(quickstart_data: Path, tmp_path: Path) -> None:
    """Each resume continues the unfinished groups, and the replay does so at the same steps."""
    order = random.Random(0)
    arguments = settings(quickstart_data, tmp_path, "recorded", *IN_FLIGHT, "train.steps=45", "train.resume=auto")
    directory = tmp_path / "recorded"
    for _ in range(KILLS):
        process = start(arguments)
        kill_at(process, directory, order.choice([1, 2]), order.random() * 2)
    process = start(arguments)
    assert process.wait(400) == 0
    assert [line["step"] for line in metrics(directory)] == list(range(1, 46))
    assert_repeats(directory, starts=KILLS + 1)
