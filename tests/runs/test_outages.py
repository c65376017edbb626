"""A reward service that is killed while the real stack trains: the run waits, goes on, saves at SIGTERM, and ends at the limit."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.checkpoint.folder import checkpoint_step, list_checkpoints
from tests.support.flaky_service import FlakyService
from tests.support.training_runs import Run, assert_ended, descendants, metrics_so_far

pytestmark = [pytest.mark.stack, pytest.mark.slow]

AHEAD = ["cluster.placement=disaggregated", "rollout.max_staleness=1"]
RULES = {
    "at once": [],
    "drain": [*AHEAD, "rollout.at_update=drain"],
    "refresh": [*AHEAD, "rollout.at_update=refresh"],
    "finish": [*AHEAD, "rollout.at_update=finish", "rollout.engines=2"],
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FlakyService]:
    service = FlakyService(tmp_path)
    yield service
    service.kill()


@pytest.fixture
def started(quickstart_data: Path, tmp_path: Path, service: FlakyService) -> Iterator[Callable[..., Run]]:
    runs = []

    def start(name: str, *more: str) -> Run:
        remote = ["reward.function=remote", f"reward.remote.url={service.url}", "reward.timeout=40"]
        requests = ["reward.remote.timeout=5", "reward.remote.first_wait=0.1", "reward.processes=1"]
        unfiltered = "algorithm.dynamic_sampling.enabled=false"
        runs.append(Run(quickstart_data, tmp_path, name, *remote, *requests, unfiltered, *more))
        return runs[-1]

    yield start
    for training in runs:
        if training.process.poll() is None:
            training.process.kill()
            training.process.wait()


def notices(training: Run) -> list[str]:
    file = training.directory / "notices.jsonl"
    return [json.loads(line)["text"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_notice(training: Run, words: str, count: int = 1, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while sum(words in notice for notice in notices(training)) < count:
        assert training.process.poll() is None, training.process.communicate()[1]
        assert time.monotonic() < deadline, notices(training)
        time.sleep(0.1)


@pytest.mark.parametrize("rule", RULES)
def test_a_run_waits_for_a_service_and_saves_at_sigterm_during_an_outage(
    started: Callable[..., Run], service: FlakyService, rule: str
) -> None:
    training = started("waiting", "train.save_every=0", *RULES[rule])
    training.wait_for_steps(2)
    service.kill()
    wait_for_notice(training, f"{service.url} is down: no connection")
    time.sleep(5)  # for the steps with groups that were scored before
    reached = len(metrics_so_far(training.directory))
    time.sleep(5)
    assert len(metrics_so_far(training.directory)) == reached
    service.start()
    wait_for_notice(training, f"{service.url} is back after")
    training.wait_for_steps(reached + 3)
    service.kill()
    wait_for_notice(training, "is down", count=2)
    processes = descendants(training.process.pid)
    training.process.send_signal(signal.SIGTERM)
    status, errors = training.end(60)
    assert status == 143, errors
    assert_ended(processes)
    lines = [json.loads(line) for line in metrics_so_far(training.directory)]
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert all(line["rollout/groups_unscored"] == line["rollout/scoring_failed"] == 0 for line in lines)
    assert max(line.get("rollout/outage_seconds", 0.0) for line in lines) > 5
    (checkpoint,) = list_checkpoints(training.directory / "checkpoints")
    assert checkpoint_step(checkpoint) in (len(lines), len(lines) + 1)


def test_the_limit_saves_and_ends_the_run_without_a_restart(started: Callable[..., Run], service: FlakyService) -> None:
    training = started("limited", "train.save_every=100", "rollout.outage_timeout=6", "train.restarts=3")
    training.wait_for_steps(2)
    processes = descendants(training.process.pid)
    service.kill()
    status, errors = training.end(120)
    assert status == 1
    assert f"ServiceOutage: {service.url} has been down for" in errors and "(rollout.outage_timeout = 6)" in errors
    assert "started again" not in errors and "Traceback" not in errors
    assert_ended(processes)
    (checkpoint,) = list_checkpoints(training.directory / "checkpoints")
    assert checkpoint_step(checkpoint) == len(metrics_so_far(training.directory))
