"""Training over several nodes, as a cluster starts it: launch/multinode.sh with a recipe on each, here all on one machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.cluster.process import free_port
from tests.support.stack import ROOT, environment, metrics
from tests.support.training_runs import SMALL, assert_ended, descendants, settings

pytestmark = [pytest.mark.stack, pytest.mark.slow]


class Nodes:
    """The nodes of one run, with each node's output."""

    def __init__(self, count: int, arguments: list[str], *, join_timeout: int = 120) -> None:
        self.count, self.arguments, self.join_timeout = count, arguments, join_timeout
        self.port = str(free_port())
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.lines: dict[int, list[str]] = {}
        self._readers: dict[int, threading.Thread] = {}

    def start(self, rank: int, **environ: str) -> None:
        foreign = ("RAY_", "SLURM_", "PET_")
        env = {name: value for name, value in environment().items() if not name.startswith(foreign)}
        env |= {"NNODES": str(self.count), "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": self.port, "DEVICES_PER_NODE": "1", "MEGARL_JOIN_TIMEOUT": str(self.join_timeout)}
        env |= environ
        bash = shutil.which("bash")
        assert bash is not None
        self.processes[rank] = process = subprocess.Popen(
            [bash, "launch/multinode.sh", *self.arguments],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = self.lines[rank] = []
        assert process.stdout is not None
        self._readers[rank] = threading.Thread(target=lines.extend, args=[process.stdout])
        self._readers[rank].start()

    def end(self, rank: int, seconds: float) -> tuple[int, str]:
        """Return a node's exit status and output."""
        status = self.processes[rank].wait(seconds)
        self._readers[rank].join(10)
        return status, "".join(self.lines[rank])

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for rank, process in self.processes.items():
            process.wait(60)
            self._readers[rank].join(10)


@pytest.fixture
def cluster() -> Iterator[object]:
    started: list[Nodes] = []

    def make(count: int, arguments: list[str], **options: int) -> Nodes:
        started.append(Nodes(count, arguments, **options))
        return started[-1]

    yield make
    for nodes in started:
        nodes.close()


def trained(data: Path, runs: Path, name: str, *more: str) -> list[str]:
    return ["recipes/quickstart.yaml", *settings(data, runs, name, *SMALL, "observe.console=plain", *more)]


def machines(run: Path) -> set[str]:
    """Return the node addresses in the log headers of trainers and engines."""
    heads = [log.read_text().split("\n", 1)[0] for log in (run / "logs").glob("*.log")]
    return {match[1] for head in heads if (match := re.search(r"pid \d+ on (\S+)", head))}


@pytest.mark.parametrize(("count", "late"), [(2, 0.0), (3, 15.0)], ids=["two", "three, one of them late"])
def test_nodes_train_together(cluster, quickstart_data: Path, tmp_path: Path, count: int, late: float) -> None:
    """Each node has a trainer except the last, which has the engine: groups, weights and samples cross nodes."""
    more = [f"cluster.trainers={count - 1}", "cluster.placement=disaggregated", "train.steps=2"]
    nodes = cluster(count, trained(quickstart_data, tmp_path, "together", *more))
    for rank in range(count - 1):
        nodes.start(rank)
    time.sleep(late)
    nodes.start(count - 1)
    status, output = nodes.end(0, 300)
    assert status == 0, output
    assert f"{count} nodes have joined" in output
    assert [line["step"] for line in metrics(tmp_path / "together")] == [1, 2]
    assert json.loads((tmp_path / "together" / "summary.json").read_text())["status"] == "finished"
    for rank in range(1, count):
        assert nodes.end(rank, 30)[0] == 0


def test_a_dead_node_ends_the_run_and_is_named(cluster, quickstart_data: Path, tmp_path: Path) -> None:
    """All processes of a node are killed at once, as in a power cut. The other nodes end within a minute and name it."""
    more = ["cluster.trainers=2", "cluster.placement=disaggregated", "train.steps=500"]
    nodes = cluster(3, trained(quickstart_data, tmp_path, "dies", *more))
    for rank in range(3):
        nodes.start(rank)
    run = tmp_path / "dies"
    deadline = time.monotonic() + 240
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
        assert nodes.processes[0].poll() is None, nodes.end(0, 10)[1]
        assert time.monotonic() < deadline, "no step was done in time"
        time.sleep(0.2)
    everything = [process for rank in range(3) for process in descendants(nodes.processes[rank].pid)]
    lost = [psutil.Process(nodes.processes[1].pid), *descendants(nodes.processes[1].pid)]
    for process in lost:
        process.kill()
    status, output = nodes.end(0, 60)
    assert status == 1
    assert "node rank 1 has left" in output
    assert "Traceback" not in output
    assert nodes.end(2, 30)[0] == 1
    assert_ended(everything, 20)


SAVING = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(20)  # a checkpoint is being written
    pathlib.Path(sys.argv[1]).write_text("whole")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[2]).touch()
time.sleep(1000)
"""


@pytest.mark.parametrize("terminated", [[1], [0, 1]], ids=["another node", "all"])
def test_a_terminated_node_waits_for_the_run_to_end(cluster, tmp_path: Path, terminated: list[int]) -> None:
    """An evicted pod or a Slurm job at its time limit sends SIGTERM to a node; its trainer must finish its checkpoint."""
    saved, begun = tmp_path / "saved", tmp_path / "begun"
    nodes = cluster(2, ["--", sys.executable, "-c", SAVING, str(saved), str(begun)])
    nodes.start(0)
    nodes.start(1)
    deadline = time.monotonic() + 120
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for rank in terminated:
        nodes.processes[rank].terminate()
    time.sleep(10)
    assert nodes.processes[1].poll() is None, f"its Ray is still needed: {nodes.end(1, 5)[1]}"
    status, output = nodes.end(0, 60)
    assert status == 143 and "one more signal ends it at once" in output
    assert saved.read_text() == "whole"
    assert nodes.end(1, 30)[0] == 143


def test_a_second_signal_ends_all_processes_immediately(cluster, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    nodes = cluster(1, ["--", sys.executable, "-c", SAVING, str(tmp_path / "saved"), str(begun)])
    nodes.start(0)
    deadline = time.monotonic() + 60
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    processes = psutil.Process(nodes.processes[0].pid).children(recursive=True)
    nodes.processes[0].terminate()
    time.sleep(2)
    nodes.processes[0].terminate()
    assert nodes.end(0, 5)[0] == 143
    assert_ended(processes, 5)


def test_nodes_that_start_simultaneously_join(cluster) -> None:
    """On one machine, Ray nodes that start together take each other's sockets, and one must restart."""
    nodes = cluster(3, ["--", "true"])
    for rank in range(3):
        nodes.start(rank)
    for rank in range(3):
        status, output = nodes.end(rank, 120)
        assert status == 0, output


def test_a_node_whose_ray_fails_reports_the_cause_to_all(cluster) -> None:
    nodes = cluster(2, ["--", "true"], join_timeout=400)
    nodes.start(0)
    nodes.start(1, MEGARL_NODE_IP="203.0.113.1")  # no address of this machine
    status, output = nodes.end(0, 300)  # before the time for joining is up
    assert status == 1
    assert "node rank 1: Ray ended with exit code" in output
    assert nodes.end(1, 30)[0] == 1


def test_a_missing_node_ends_the_waiting_nodes(cluster, quickstart_data: Path, tmp_path: Path) -> None:
    nodes = cluster(3, trained(quickstart_data, tmp_path, "never", "train.steps=2"), join_timeout=25)
    nodes.start(0)
    nodes.start(2)
    status, output = nodes.end(0, 90)
    assert status == 1
    assert "node rank 1 of 3 did not join within 25 s" in output
    assert nodes.end(2, 30)[0] == 1
    assert not (tmp_path / "never").exists()
