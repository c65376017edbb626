"""Trainers under torchrun: rank 0 controls, the others serve."""

import os
import re
import signal
import subprocess
import sys

import pytest

from megarl.cluster.torchrun.cluster import TERMINATE_SECONDS, _Waiting
from megarl.recipe.schema import Recipe
from tests.support.cluster_workers import ROOT, alive, wait_until
from tests.support.slow import slow_except

pytestmark = pytest.mark.stack


@pytest.fixture
def launch(tmp_path):
    """Start a scenario under torchrun; ends it with the test."""
    started = []

    def launch(scenario):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        command += ["-m", "tests.support.cluster_workers", scenario, str(tmp_path)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


def pids_of(process):
    """The process ids that the scenario tells of: engine, its child, rank 0."""
    lines = []
    for line in process.stdout:
        if line.startswith("FACT pids"):
            return [int(pid) for pid in line.split()[2:]]
        lines.append(line)
    raise AssertionError(f"the scenario ended early:\n{''.join(lines)}")


def test_a_run_under_torchrun_completes(launch, tmp_path):
    output, _ = launch("good").communicate(timeout=90)
    facts = [line for line in output.splitlines() if line.startswith("FACT")]
    assert facts[-1] == "FACT done", output
    assert "(1, " in facts[0] and facts[0].count("'2', 'trainer'") == 2
    assert facts[1] == "FACT [4.0, 4.0] [(0, 'a'), (1, 'b')]"
    assert facts[2] == "FACT ['from 0', 'from 1'] [9.0, 9.0]"
    assert facts[3] == "FACT None [(0, 'both'), (1, 'both')]"
    assert facts[4] == "FACT ['engine', '2', None]"
    assert "trainer rank 1" in (tmp_path / "trainer-1.log").read_text()
    assert not any(alive(pid) for pid in map(int, facts[5].split()[2:]))


@pytest.mark.parametrize(
    ("scenario", "message"),
    slow_except(
        lambda item: item[0] == "die_in_collective",
        [
            ("die_in_collective", "WorkerFailed trainer rank 1 on .* died: its process ended without a message"),
            ("raise_in_collective", "WorkerFailed trainer rank 1 on .* failed: ValueError: this rank has had enough"),
            (
                "stop_in_collective",
                r"WorkerFailed trainer rank 1 on .* \(pid \d+\) failed: its process has been stopped for 3 s",
            ),
            (
                "stopped_before_a_large_call",
                r"WorkerFailed trainer rank 1 on .* \(pid \d+\) failed: its process has been stopped for 3 s",
            ),
            (
                "sleep_in_collective",
                r"TrainersStalled trainer rank 1 on .* \(pid \d+\) failed: others wait for it in sleep_in_collective",
            ),
            (
                "sleep_in_backward",
                r"TrainersStalled trainer rank 1 on .* \(pid \d+\) failed: others wait for it in sleep_in_backward",
            ),
            ("trainer_dies_polled", "WorkerFailed trainer rank 1 on .* died: its process ended without a message"),
            ("trainer_dies_unpolled", "WorkerFailed trainer rank 1 on .* died: its process ended without a message"),
            ("engine_dies", r"ServiceDied service engine0 on .* died: .*SIGKILL"),
        ],
    ),
)
def test_the_first_cause_is_reported_within_seconds(launch, scenario, message):
    process = launch(scenario)
    pids = pids_of(process)
    output, _ = process.communicate(timeout=60)
    (fact,) = [line for line in output.splitlines() if line.startswith("FACT failed")]
    assert re.search(message, fact), output
    limit = 3 if scenario.startswith("trainer_dies") else 20 if scenario.startswith("sleep_in") else 8
    assert float(fact.split()[2]) < limit
    assert process.returncode != 0
    assert wait_until(lambda: not any(map(alive, pids)), 5)
    if scenario in ("die_in_collective", "sleep_in_collective"):
        assert "  the last words" in output
    if scenario.startswith("sleep_in"):
        assert_both_ranks_are_named(scenario, output)


def assert_both_ranks_are_named(scenario, output):
    lines = output[output.index("waiting for others:") :].splitlines()
    caller = "sum" if scenario == "sleep_in_collective" else scenario
    assert lines[1] == "  rank 0: all_reduce in the group of all trainers (ranks 0-1)"
    assert re.fullmatch(rf"    .*tests/support/cluster_workers.py:\d+ {caller}", lines[2])
    waited_for = lines[lines.index("others wait for:") + 1 :]
    where = "backward of layer 3, " if scenario == "sleep_in_backward" else ""
    assert re.fullmatch(
        rf"  trainer rank 1 on .* \(pid \d+\): {where}1 collective behind in the group of all trainers", waited_for[0]
    )
    sleeper = "forward" if where else scenario
    assert re.fullmatch(rf"    .*tests/support/cluster_workers.py:\d+ {sleeper}", waited_for[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_with_torchrun(launch, how):
    process = launch("idle")
    pids = pids_of(process)
    assert all(map(alive, pids))
    process.send_signal(how)
    assert wait_until(lambda: not any(map(alive, pids)), 10)


def test_a_sigterm_ends_the_wait_once(monkeypatch):
    # the end of the run waits again, for a checkpoint that is being written
    waiting = _Waiting()
    now = 100.0
    monkeypatch.setattr("megarl.cluster.torchrun.cluster.time.monotonic", lambda: now)
    waiting.terminated_at = now
    waiting.check()
    now += TERMINATE_SECONDS + 0.1
    with pytest.raises(SystemExit) as ended:
        waiting.check()
    assert ended.value.code == 128 + signal.SIGTERM
    now += TERMINATE_SECONDS + 0.1
    waiting.check()


def test_a_wrong_launch_is_refused_with_the_command(monkeypatch, tmp_path):
    from megarl.cluster import connect, transport
    from megarl.platform import select

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    recipe = Recipe()
    assert transport(recipe.cluster) == "ray"
    recipe.cluster.transport = "torchrun"
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node 1"):
        transport(recipe.cluster)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert transport(recipe.cluster) == "torchrun"
    with pytest.raises(ValueError, match=r"launch/multinode\.sh"):
        connect(recipe, select("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with pytest.raises(ValueError, match=r"--nproc-per-node 1, or set cluster\.trainers=16"):
        connect(recipe, select("cpu"))
