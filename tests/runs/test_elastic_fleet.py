"""Real engines join and leave a run (`megarl engines`, a node that ends), and each group is trained once."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.checkpoint.controller_state import load_state
from tests.runs.test_fleet import FLEET
from tests.runs.test_multinode import Nodes
from tests.support.stack import metrics, run
from tests.support.training_runs import SMALL, Run, background_runs, settings

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ELASTIC = [*FLEET, "algorithm.dynamic_sampling.enabled=false"]
SECONDS = 600.0  # for an engine to start and join


@pytest.fixture
def started(quickstart_data: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with background_runs(quickstart_data, tmp_path, *ELASTIC) as start:
        yield start


def wait_for(directory: Path, alive: Callable[[], bool], **figures: float) -> None:
    """Wait until the last step has these values of `fleet/...`."""
    deadline = time.monotonic() + SECONDS
    while any(metrics(directory)[-1].get(f"fleet/{name}") != value for name, value in figures.items()):
        assert alive(), "the run has ended"
        assert time.monotonic() < deadline, f"not {figures}: {metrics(directory)[-1]}"
        time.sleep(0.2)


def engines(directory: Path, *request: str) -> str:
    done = run("engines", str(directory), *request)
    assert done.returncode == 0, done.stderr
    return done.stdout


def step_of(path: Path) -> int:
    return int(path.stem.split("_")[1])


def assert_each_group_once(directory: Path) -> None:
    """The groups of all steps, and what the last checkpoint has of later ones, are all groups that were admitted."""
    newest = max((directory / "checkpoints").glob("step_*"), key=step_of)
    files = [file for file in (directory / "samples").iterdir() if step_of(file) <= step_of(newest)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    samples = Counter((line["group"], line["index"]) for line in lines)
    assert set(samples.values()) == {1}, "no sample is trained twice"
    trained = {group for group, _ in samples}
    assert len(samples) == 4 * len(trained) == 16 * step_of(newest)
    source = load_state(newest)["source"]
    later = [item.group.number for batch in source["gathered"] for item in batch]
    later += [item.group.number for item in source["waiting"]] + source["unfinished"]
    assert sorted([*trained, *later]) == list(range(source["counters"]["admitted"])), "no group is lost"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "settings", [["rollout.max_staleness=2", "rollout.at_update=refresh"], ["rollout.at_update=drain"]], ids=" ".join
)
def test_an_engine_joins_and_leaves(started: Callable[..., Run], settings: list[str]) -> None:
    training = started("elastic", *settings)
    training.wait_for_steps(2)
    directory, alive = training.directory, lambda: training.process.poll() is None
    assert "2 -> 3 engines wanted" in engines(directory, "+1")
    wait_for(directory, alive, serving=3.0, wanted=3.0)
    listed = json.loads(engines(directory, "list", "--json"))
    assert [row["state"] for row in listed["engines"]] == ["serving"] * 3 and listed["free"] is None
    assert (directory / "logs" / "engine2.log").exists()
    training.wait_for_steps(len(metrics(directory)) + 3)
    assert "3 -> 2 engines wanted" in engines(directory, "-1")
    wait_for(directory, alive, serving=2.0, wanted=2.0, leaving=0.0)
    training.wait_for_steps(len(metrics(directory)) + 3)
    assert run("engines", str(directory), "0").returncode == 2, "fewer than rollout.min_engines"
    training.process.terminate()
    status, errors = training.end(120)
    assert status == 143, errors
    assert {line["fleet/deaths"] for line in metrics(directory)} == {0.0}
    notices = (directory / "notices.jsonl").read_text()
    for text in ("engine2 starts", "engine2 has the run's weights, and samples", "engine2 leaves", "engine2 has left"):
        assert text in notices, notices
    assert_each_group_once(directory)


@pytest.mark.timeout(1800)
def test_a_node_with_an_engine_leaves(quickstart_data: Path, tmp_path: Path) -> None:
    """SIGTERM to its launcher, as before a preemption: its engine starts again on another node. The first node has the trainer, each
    of the others an engine. Ray stores all samples on the machine of their engine, as it does above 100 KB by default."""
    more = [*SMALL, *ELASTIC, "rollout.max_staleness=2", "rollout.at_update=refresh", "observe.console=plain"]
    arguments = settings(quickstart_data, tmp_path, "preempted", "train.steps=500", *more)
    nodes = Nodes(3, ["recipes/quickstart.yaml", *arguments])
    try:
        for rank in range(3):
            nodes.start(rank, RAY_max_direct_call_object_size="1")
        directory, alive = tmp_path / "preempted", lambda: nodes.processes[0].poll() is None
        deadline = time.monotonic() + SECONDS
        while not (directory / "metrics.jsonl").exists() or len(metrics(directory)) < 2:
            assert alive(), nodes.end(0, 10)[1]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        nodes.processes[2].terminate()
        status, output = nodes.end(2, 60)
        assert status == 0 and "this node has left, and the run goes on" in output, [output, *nodes.lines[0]]
        wait_for(directory, alive, serving=2.0, leaving=0.0)
        assert {line["fleet/deaths"] for line in metrics(directory)} == {0.0}
        nodes.processes[0].terminate()
        status, output = nodes.end(0, 200)
        assert status == 143, output
        assert "node rank 2 received a signal to end: the run goes on, and engine" in output
    finally:
        nodes.close()
    assert_each_group_once(directory)
