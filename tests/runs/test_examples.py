"""The projects of examples/ on the real stack, for a few steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.stack import metrics
from tests.support.tutorials import run_in, workspace

pytestmark = [pytest.mark.stack, pytest.mark.slow]
STEPS = 4
FEW = f"train.steps={STEPS} evaluation.at_start=false evaluation.at_end=false evaluation.greedy=false train.save_at_end=false"


@pytest.fixture(scope="module")
def place(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's model after some SFT, which is also the teacher."""
    folder = workspace(tmp_path_factory.mktemp("examples"), quickstart_data)
    done = run_in(folder, "python -m megarl train recipes/quickstart_sft.yaml train.steps=600")
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def train(place: Path, project: str, *more: str) -> list[dict[str, float]]:
    done = run_in(place, f"python -m megarl train examples/{project}/recipe.yaml {FEW} {' '.join(more)}")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line for line in metrics(place / "runs" / project.replace("_", "-")) if line["step"] > 0]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)) and len(lines) >= STEPS
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    return lines


def test_own_reward(place: Path) -> None:
    for line in train(place, "own_reward"):
        assert 0 <= line["critic/score/brevity/mean"] <= 1


def test_own_loss(place: Path) -> None:
    for line in train(place, "own_loss"):
        assert line["actor/ratio"] == pytest.approx(1, abs=0.2)


def test_own_tool(place: Path) -> None:
    done = run_in(place, "python -m examples.own_tool.tool")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = train(place, "own_tool", "train.steps=8")
    assert lines[-1]["agent/calls/mean"] > lines[0]["agent/calls/mean"]


def test_own_interaction(place: Path) -> None:
    done = run_in(place, "python -m examples.own_interaction.user")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = train(place, "own_interaction", "train.steps=8")
    assert lines[-1]["rollout/rewards/mean"] > lines[0]["rollout/rewards/mean"]


def test_distillation(place: Path) -> None:
    """A teacher with the student's weights has no distance to it; the random model has."""
    shutil.copytree(place / "runs/quickstart-sft/hf", place / "runs/quickstart/hf")
    assert train(place, "distillation")[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-4)
    shutil.rmtree(place / "runs/distillation")
    far = train(place, "distillation", "teacher.path=data/quickstart/model")
    assert far[0]["actor/reward_kl_penalty"] > 1


def test_asynchronous(place: Path) -> None:
    lines = train(place, "asynchronous")
    assert max(line["rollout/staleness_max"] for line in lines) > 0
    done = run_in(place, "python -m examples.asynchronous.lag runs/asynchronous")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == STEPS + 1, done.stderr
