"""A run with an engine group on the real stack: training on its samples, and the death of one engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megarl.cluster.device_map import Demand, place_on_cpus
from megarl.cluster.process import free_port
from tests.support.stack import ROOT, environment, metrics, run
from tests.support.training_runs import (
    SMALL,
    Run,
    assert_ended,
    background_runs,
    descendants,
    pid_in_log,
    settings,
    wait_for,
)

pytestmark = [pytest.mark.stack, pytest.mark.slow]

GROUP = [*SMALL, "rollout.engines=2", "rollout.data_parallel=2"]


def test_a_group_trains_like_a_single_engine(quickstart_data: Path, tmp_path: Path) -> None:
    """The log-prob gap detects weights that reach only half of the experts, and samples of mixed versions."""
    more = ["train.steps=2", "evaluation.at_end=true", "algorithm.dynamic_sampling.enabled=false"]
    for name, engines in (("alone", SMALL), ("group", GROUP)):
        arguments = settings(quickstart_data, tmp_path, name, *engines, *more)
        done = run("train", "recipes/quickstart.yaml", *arguments, torchrun=1)
        assert done.returncode == 0, done.stderr + done.stdout
    alone, group = (metrics(tmp_path / name) for name in ("alone", "group"))
    assert [line["rollout/logprob_gap_max"] for line in group] == pytest.approx([0, 0], abs=1e-4)
    for line, group_line in zip(alone, group, strict=True):
        assert line.keys() == group_line.keys()
        for name in {
            "rollout/rewards/mean",
            "response_length/mean",
            "actor/grad_norm",
            "weight_sync/version",
        } & line.keys():
            assert line[name] == pytest.approx(group_line[name], rel=1e-3, abs=1e-6), name


def test_engines_sample_ahead_and_are_evaluated(quickstart_data: Path, tmp_path: Path) -> None:
    """One-step-off, continuous admission and evaluations between: each could make one engine wait for another."""
    more = [
        "train.steps=4", "rollout.max_staleness=1", "rollout.at_update=drain", "cluster.placement=disaggregated", "rollout.engines=2",
        "rollout.admission=continuous", "evaluation.every=2", "evaluation.greedy=true", "cluster.transport=ray",
    ]  # fmt: skip
    for name, engines in (("alone", SMALL), ("group", GROUP)):
        done = run("train", "recipes/quickstart.yaml", *settings(quickstart_data, tmp_path, name, *engines, *more))
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr + done.stdout
    alone, group = (metrics(tmp_path / name) for name in ("alone", "group"))
    assert [line["rollout/staleness_max"] for line in group] == [0, 1, 1, 1]
    for line, group_line in zip(
        alone, group, strict=True
    ):  # a stale sample's gap is the policy's change since its version
        assert line.keys() == group_line.keys()
        for name in {"rollout/logprob_gap_mean", "rollout/rewards/mean", "eval/rewards/mean"} & line.keys():
            assert line[name] == pytest.approx(group_line[name], rel=0.02, abs=1e-5), name


@pytest.mark.parametrize("name", ["engine0", "engine1"])
def test_a_killed_engine_is_named_and_not_its_group(quickstart_data: Path, tmp_path: Path, name: str) -> None:
    """The error is not the other engine's broken connection, nor a collective's half-hour timeout."""
    training = Run(quickstart_data, tmp_path, "killed", *GROUP)
    try:
        training.wait_for_steps(1)
        processes = descendants(training.process.pid)
        log = (training.directory / "logs" / f"{name}.log").read_text()
        os.kill(int(log.split("pid ")[1].split()[0]), signal.SIGKILL)
        status, errors = training.end(30)
    finally:
        training.process.kill()
    assert status == 1
    assert f"service {name}" in errors and "SIGKILL" in errors, errors
    assert_ended(processes)


def test_a_group_spans_two_nodes(quickstart_data: Path, tmp_path: Path) -> None:
    """The engine group's rendezvous address must be reachable from the other node."""
    demand = Demand(trainers=2, engines=2, shared=True)
    assert place_on_cpus([1, 1], demand).engines == [[(0, 0)], [(1, 0)]]
    arguments = settings(
        quickstart_data, tmp_path, "nodes", "rollout.engines=2", "rollout.data_parallel=2", "train.steps=2",
        "evaluation.at_start=false", "evaluation.at_end=false", "train.export_at_end=false", "observe.console=plain",
    )  # fmt: skip
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            ["bash", "launch/multinode.sh", "recipes/quickstart.yaml", *arguments],
            cwd=ROOT,
            env={name: value for name, value in environment().items() if not name.startswith("RAY_")}
            | {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "DEVICES_PER_NODE": "1"}
            | {"MEGARL_JOIN_TIMEOUT": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
            node.wait(30)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in metrics(tmp_path / "nodes"))


@pytest.mark.timeout(900)
def test_a_group_with_a_dead_engine_starts_again_while_the_run_goes_on(quickstart_data: Path, tmp_path: Path) -> None:
    """The other group samples meanwhile, and the new processes form a group again, which gets the weights and samples."""
    more = [
        "cluster.placement=disaggregated", "rollout.engines=4", "rollout.data_parallel=2", "rollout.min_engines=2", "train.save_every=0",
        "train.stop_after_skipped=0", "rollout.max_response_length=48", "rollout.max_staleness=1", "rollout.at_update=drain",
    ]  # fmt: skip
    with background_runs(quickstart_data, tmp_path, *SMALL, *more) as start:
        run = start("groups")
        run.wait_for_steps(2)
        peer = pid_in_log(run.directory, "engine0")
        os.kill(pid_in_log(run.directory, "engine1"), signal.SIGKILL)
        wait_for(run, "fleet/serving", 2.0)
        wait_for(run, "fleet/serving", 4.0)
        assert not psutil.pid_exists(peer), "it waits for its group in each step"
        run.wait_for_steps(len(metrics(run.directory)) + 2)
        run.process.send_signal(signal.SIGTERM)
        status, errors = run.end(120)
    assert status == 143, errors
    lines, notices = metrics(run.directory), (run.directory / "notices.jsonl").read_text()
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert "engine0 ends with engine1, of the same group" in notices and "SIGKILL" in notices
    assert all(f"engine{number} has the run's weights, and samples" in notices for number in (0, 1))
    assert max(line["rollout/logprob_gap_max"] for line in lines if line["rollout/staleness_max"] == 0) < 1e-4
