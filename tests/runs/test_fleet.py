"""Real engines die, and the run goes on (`rollout.min_engines`)."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from benchmarks.deaths import OF_FAULTS
from benchmarks.injection import hang
from megarl.observe.metrics import without_times
from tests.support.stack import metrics
from tests.support.training_runs import SMALL, Run, background_runs, pid_in_log, train, wait_for

pytestmark = pytest.mark.stack

FLEET = [
    "cluster.trainers=1",
    "megatron.expert_parallel=1",
    "cluster.placement=disaggregated",
    "rollout.engines=2",
    "rollout.min_engines=1",
    "rollout.max_response_length=48",
    "evaluation.at_start=false",
    "evaluation.every=0",
    "evaluation.at_end=false",
    "train.stop_after_skipped=0",
    "train.save_every=0",
]


@pytest.fixture
def started(quickstart_data: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with background_runs(quickstart_data, tmp_path, *FLEET) as start:
        yield functools.partial(start, "fleet")


RULES = [
    ["rollout.max_staleness=2", "rollout.at_update=refresh"],
    pytest.param(["rollout.max_staleness=2", "rollout.at_update=keep"], marks=pytest.mark.slow),
    pytest.param(["rollout.max_staleness=1", "rollout.at_update=drain"], marks=pytest.mark.slow),
    pytest.param(["lora.rank=4", "rollout.max_staleness=1"], marks=pytest.mark.slow),
    pytest.param(["weight_sync.route=full"], marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", RULES, ids=" ".join)
def test_a_killed_engine_starts_again_while_the_run_goes_on(started: Callable[..., Run], settings: list[str]) -> None:
    """Tiny steps consist mostly of updates: the kill meets one or not, and the run goes on in both cases."""
    run = started(*settings)
    run.wait_for_steps(2)
    os.kill(pid_in_log(run.directory, "engine1"), signal.SIGKILL)
    wait_for(run, "fleet/deaths", 1.0)
    wait_for(run, "fleet/serving", 2.0)
    run.wait_for_steps(len(metrics(run.directory)) + 2)
    run.process.send_signal(signal.SIGTERM)
    status, errors = run.end(120)
    assert status == 143, errors
    notices = (run.directory / "notices.jsonl").read_text()
    assert "service engine1" in notices and "killed (SIGKILL" in notices and "engine1 has the run's weights" in notices
    assert [line["step"] for line in metrics(run.directory)] == list(range(1, len(metrics(run.directory)) + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0, 1])
def test_deaths_of_engines_change_no_number(
    started: Callable[..., Run], quickstart_data: Path, tmp_path: Path, staleness: int
) -> None:
    """The other engines sample the dead engine's groups from the same seeds, whatever else they sample meanwhile."""
    settings = ["rollout.engines=3", f"rollout.max_staleness={staleness}", "rollout.at_update=drain", "train.steps=10"]
    assert train(quickstart_data, tmp_path, "undisturbed", *SMALL, *FLEET, *settings).returncode == 0
    run = started(*settings)
    for step, engine in ((2, "engine1"), (5, "engine2")):
        run.wait_for_steps(step)
        os.kill(pid_in_log(run.directory, engine), signal.SIGKILL)
    status, errors = run.end(300)
    assert status == 0, errors
    ours, theirs = (without_times(metrics(folder)) for folder in (run.directory, tmp_path / "undisturbed"))
    assert ours[-1]["fleet/deaths"] == 2 and any(line["fleet/sampled_again"] > 0 for line in ours)
    assert [of_samples(line) for line in ours] == [of_samples(line) for line in theirs]


def of_samples(line: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without those that deaths of engines change."""
    return {name: value for name, value in line.items() if not name.startswith(OF_FAULTS)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_that_hangs_without_being_stopped_is_replaced(started: Callable[..., Run]) -> None:
    """No thread of it runs, and /proc does not call it stopped, as after a fault of a device or its driver."""
    run = started("rollout.max_staleness=2", "rollout.step_timeout=20")
    run.wait_for_steps(2)
    tracer = hang(pid := pid_in_log(run.directory, "engine1"))
    wait_for(run, "fleet/deaths", 1.0)
    assert tracer.wait(60) == 0 and not psutil.pid_exists(pid), (
        "its process must end, since its successor takes its device"
    )
    wait_for(run, "fleet/serving", 2.0)
    run.wait_for_steps(len(metrics(run.directory)) + 2)
    run.process.send_signal(signal.SIGTERM)
    status, errors = run.end(120)
    assert status == 143, errors
    assert re.search(r"engine1 .*died: it hangs: its .* for 20 s", (run.directory / "notices.jsonl").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_too_few_engines_end_the_run(started: Callable[..., Run]) -> None:
    run = started("rollout.max_staleness=1", "rollout.engines=3", "rollout.min_engines=2")
    run.wait_for_steps(1)
    for engine in ("engine0", "engine1"):
        os.kill(pid_in_log(run.directory, engine), signal.SIGKILL)
    status, errors = run.end(120)
    assert status == 1 and "Fewer than rollout.min_engines = 2 engines are left" in errors, errors
