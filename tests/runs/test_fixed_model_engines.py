"""Real engines of the judge and of a teacher die, and the run goes on with the numbers of an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.observe.metrics import without_times
from tests.runs.test_judge import SUM, judging
from tests.support.stack import metrics
from tests.support.training_runs import SMALL, Run, background_runs, pid_in_log, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = [
    "train.steps=8",
    "train.save_every=0",
    "train.stop_after_skipped=0",
    "algorithm.dynamic_sampling.enabled=false",
]


def of_judge(data: Path, folder: Path) -> list[str]:
    return [*judging(data, folder), *SUM, "judge.restarts=2"]


def of_teacher(data: Path, folder: Path) -> list[str]:
    shutil.copytree(data / "model", folder / "teacher_model")
    return [
        "algorithm.reference=teacher", "algorithm.kl_coef=0.1", f"teacher.path={folder}/teacher_model", "teacher.restarts=2",
        "teacher.engine_args={kv_cache_memory_bytes: 67108864, max_num_seqs: 16}",
    ]  # fmt: skip


ROLES = pytest.mark.parametrize(
    "role, settings", [("judge", of_judge), ("teacher", of_teacher)], ids=["judge", "teacher"]
)


@pytest.fixture
def started(quickstart_data: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with background_runs(quickstart_data, tmp_path, *SHORT) as start:
        yield start


def notices(run: Run) -> list[dict[str, str]]:
    return [json.loads(line) for line in (run.directory / "notices.jsonl").open()]


@ROLES
@pytest.mark.parametrize("torchrun", [0, 1], ids=["ray", "torchrun"])
def test_deaths_change_no_number(
    torchrun: int,
    role: str,
    settings: Callable[..., list[str]],
    started: Callable[..., Run],
    quickstart_data: Path,
    tmp_path: Path,
) -> None:
    """The only engine is killed twice, and stopped once."""
    more = settings(quickstart_data, tmp_path)
    assert train(quickstart_data, tmp_path, "undisturbed", *SMALL, *SHORT, *more, torchrun=torchrun).returncode == 0
    run = started("disturbed", *more, torchrun=torchrun)
    for step, sent in ((1, signal.SIGKILL), (3, signal.SIGKILL), (5, signal.SIGSTOP)):
        run.wait_for_steps(step)
        os.kill(pid_in_log(run.directory, f"{role}0"), sent)
    status, errors = run.end(300)
    assert status == 0, errors
    ours, theirs = (without_times(metrics(folder)) for folder in (run.directory, tmp_path / "undisturbed"))
    assert ours[-1][f"fleet/{role}_deaths"] == 3
    assert [of_samples(line) for line in ours] == [of_samples(line) for line in theirs]
    deaths = [each["text"] for each in notices(run) if f"service {role}0" in each["text"]]
    assert len(deaths) == 3 and "SIGKILL" in deaths[0] and "stopped" in deaths[2]


def of_samples(line: dict[str, float]) -> dict[str, float]:
    """Return the metrics that deaths of engines do not change."""
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(("fleet/", "rollout/judge_seconds", "perf/", "host/"))
    }


@ROLES
def test_an_engine_that_cannot_start_again_ends_the_run(
    role: str, settings: Callable[..., list[str]], started: Callable[..., Run], quickstart_data: Path, tmp_path: Path
) -> None:
    """Its model is gone."""
    run = started("broken", *settings(quickstart_data, tmp_path))
    run.wait_for_steps(1)
    shutil.rmtree(tmp_path / f"{role}_model")
    os.kill(pid_in_log(run.directory, f"{role}0"), signal.SIGKILL)
    status, errors = run.end(300)
    assert status == 1 and f"No engine of the {role} is left ({role}.restarts)" in errors and "Traceback" not in errors
