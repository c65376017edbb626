"""Trainers die and start again while the engines go on (`train.trainer_restarts`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.observe.metrics import without_times
from tests.support.stack import metrics
from tests.support.training_runs import Run, background_runs

pytestmark = pytest.mark.stack
DEATH = "PLANTED_DEATH"  # as in tests/support/planted_loss.py; an import of that module would register its losses here

SETTINGS = [
    "cluster.trainers=2",
    "megatron.expert_parallel=2",
    "cluster.placement=disaggregated",
    "rollout.at_update=drain",
    "evaluation.every=0",
    "train.stop_after_skipped=0",
    "train.trainer_restarts=2",
    "train.save_every=4",
    "train.steps=8",
    "algorithm.modules=[tests.support.planted_loss]",
    "algorithm.loss=dies_once",
    "algorithm.clip_high=0.2",
]


@pytest.fixture
def started(quickstart_data: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with background_runs(quickstart_data, tmp_path, *SETTINGS) as start:
        yield start


def notices(run: Run) -> list[str]:
    return [json.loads(line)["text"] for line in (run.directory / "notices.jsonl").read_text().splitlines()]


def numbers(run: Run) -> list[dict[str, float]]:
    """Return the metrics of each step that do not depend on time, memory or the order of groups."""
    lines = without_times(metrics(run.directory))
    return [
        {name: value for name, value in line.items() if not name.startswith(("perf/", "rollout/"))} for line in lines
    ]


KINDS = {
    "disaggregated": [],
    "colocated": pytest.param(["cluster.placement=colocated"], marks=pytest.mark.slow),
    "critic": pytest.param(
        ["algorithm.advantage=gae", "algorithm.dynamic_sampling.enabled=false"], marks=pytest.mark.slow
    ),
    "lora": pytest.param(["lora.rank=4"], marks=pytest.mark.slow),
    "reference": pytest.param(
        ["algorithm.kl_coef=0.1", "algorithm.kl_target=0.05", "algorithm.refresh_reference_every=2"],
        marks=pytest.mark.slow,
    ),
    "background save": pytest.param(["train.save_in_background=true"], marks=pytest.mark.slow),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_a_trainer_that_dies_leaves_the_numbers_of_a_run_equal(
    started: Callable[..., Run], more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in an update of the policy: the steps since the checkpoint are trained again on the same samples."""
    monkeypatch.setenv(DEATH, str(tmp_path / "has-died"))
    killed = started("killed", *more)
    status, errors = killed.end(300)
    assert status == 0, errors
    text = "\n".join(notices(killed))
    assert "trainer rank 1" in text and "killed (SIGKILL" in text, text
    assert re.search(
        r"from the checkpoint of step 4; steps 5 to \d were trained again .* with the same gradient norms", text
    )
    assert not (killed.directory / "batches").exists()
    undisturbed = started("undisturbed", *more)
    status, errors = undisturbed.end(300)
    assert status == 0, errors
    assert numbers(killed) == numbers(undisturbed)
