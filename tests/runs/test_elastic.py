"""`cluster.elastic` on the real stack: a run of two machines goes on with one, in a smaller layout, and its numbers continue."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.recipe.text import flat_settings
from tests.runs.test_multinode import Nodes
from tests.support.stack import metrics, run
from tests.support.training_runs import SMALL, Run, background_runs, descendants, settings

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 4
OWN = ["cluster.trainers=2", "rollout.engines=2", "cluster.placement=disaggregated", "rollout.at_update=drain"]
MORE = [*OWN, "evaluation.every=0", "train.save_every=2", "train.journal=true", "train.export_at_end=false"]
ELASTIC = ["cluster.elastic=true", "cluster.elastic_wait=10", "train.resume=auto"]


@pytest.fixture
def killed(quickstart_data: Path, tmp_path: Path) -> Iterator[Run]:
    """A run that was killed after step 3: its checkpoint is of step 2, and its journal of step 3."""
    with background_runs(quickstart_data, tmp_path, *MORE, f"train.steps={STEPS}") as start:
        training = start("elastic")
        training.wait_for_steps(3)
        os.kill(training.process.pid, signal.SIGKILL)
        training.end(60)
        yield training


def notices(directory: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (directory / "notices.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def two_nodes(data: Path, runs: Path, *more: str, join_timeout: int) -> Iterator[Nodes]:
    arguments = settings(data, runs, "elastic", *SMALL, *MORE, f"train.steps={STEPS}", "observe.console=plain", *more)
    nodes = Nodes(2, ["recipes/quickstart.yaml", *arguments], join_timeout=join_timeout)
    try:
        yield nodes
    finally:
        nodes.close()


def one_of_two_nodes(data: Path, runs: Path, *more: str) -> tuple[int, str]:
    """Start the run on the first of two nodes, with two devices each. Returns its exit status and output."""
    with two_nodes(data, runs, *more, join_timeout=40) as nodes:
        nodes.start(0, DEVICES_PER_NODE="2")
        return nodes.end(0, 1500)


def train(data: Path, runs: Path, name: str, *more: str) -> None:
    """Train on this machine, which holds both trainers and both engines."""
    done = run("train", "recipes/quickstart.yaml", *settings(data, runs, name, *SMALL, *MORE, *more), timeout=1500)
    assert done.returncode == 0, done.stderr


def resolved(directory: Path) -> dict[str, Any]:
    return flat_settings((directory / "recipe.resolved.yaml").read_text())


def test_a_run_goes_on_with_the_devices_that_are_left(quickstart_data: Path, tmp_path: Path, killed: Run) -> None:
    """Without the key it is refused. With it the numbers equal an undisturbed run's, up to rounding. With all devices back it has the
    recipe's layout again."""
    directory, lines = killed.directory, metrics(killed.directory)
    assert [line["step"] for line in lines] == [1, 2, 3]
    status, output = one_of_two_nodes(quickstart_data, tmp_path, "train.resume=auto")
    assert status == 1 and "node rank 1 of 2 did not join within 40 s" in output, output
    assert "cluster.elastic" not in output and metrics(directory) == lines

    status, output = one_of_two_nodes(quickstart_data, tmp_path, *ELASTIC)
    assert status == 0, output
    assert "node rank 1 of 2 did not join within 40 s (MEGARL_JOIN_TIMEOUT): the run goes on without" in output
    assert "1 node has joined" in output and "node rank 1 has left" not in output
    text_of_layout = (
        "this start goes on with 1 trainer and 1 engine instead of 2 trainers and 2 engines (cluster.elastic)"
    )
    assert text_of_layout in output and any(text_of_layout in text for text in notices(directory))
    assert (resolved(directory)["cluster.trainers"], resolved(directory)["rollout.engines"]) == (1, 1)
    (resumed,) = [text for text in notices(directory) if text.startswith("resumed after step 3 from the journal")]
    assert "from the checkpoint of step 2; steps 3 to 3 were trained again on their batches" in resumed
    assert "rounding, as from a layout that has changed (cluster.trainers 2 -> 1)" in resumed, resumed

    train(quickstart_data, tmp_path, "whole", f"train.steps={STEPS}")
    whole, again = metrics(tmp_path / "whole"), metrics(directory)
    assert [line["step"] for line in again] == [1, 2, 3, 4] and again[:3] == lines
    for name in ("critic/rewards/mean", "response_length/mean", "perf/total_num_tokens"):
        assert again[3][name] == whole[3][name], "the same samples"
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert again[3][name] == pytest.approx(whole[3][name], rel=1e-3, abs=1e-6), name

    train(quickstart_data, tmp_path, "elastic", *ELASTIC, f"train.steps={STEPS + 1}")
    assert any("cluster.trainers 1 -> 2" in text and "rollout.engines 1 -> 2" in text for text in notices(directory))
    assert len(metrics(directory)) == STEPS + 1


def test_a_restart_goes_on_without_a_machine_that_has_died(quickstart_data: Path, tmp_path: Path) -> None:
    """All processes of a node are killed at once, as in a power cut, and `train.restarts` starts the run on the other one."""
    directory = tmp_path / "elastic"
    with two_nodes(quickstart_data, tmp_path, *ELASTIC, "train.restarts=6", join_timeout=300) as nodes:
        for rank in range(2):
            nodes.start(rank, DEVICES_PER_NODE="2")
        deadline = time.monotonic() + 900
        while not (directory / "metrics.jsonl").exists() or len(metrics(directory)) < 2:
            assert nodes.processes[0].poll() is None, nodes.end(0, 10)[1]
            assert time.monotonic() < deadline, "no step was done in time"
            time.sleep(0.1)
        node = nodes.processes[1].pid
        for process in [psutil.Process(node), *descendants(node)]:
            process.kill()
        status, output = nodes.end(0, 1500)
    assert status == 0, output
    assert "node rank 1 has left" in output and "the run is started again from step" in output
    assert "this start goes on with 1 trainer and 1 engine instead of 2 trainers and 2 engines" in output
    assert [line["step"] for line in metrics(directory)] == list(range(1, STEPS + 1))
