"""PPO with a critic on the real stack: Megatron, vLLM, mbridge and Ray, at tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.observe.metrics import without_times
from tests.support.stack import metrics, run
from tests.support.training_runs import settings

pytestmark = pytest.mark.stack

PPO = [
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "train.steps=3",
    "critic.warmup_steps=1",
    "actor.optimizer.weight_decay=0",  # nothing but a gradient moves a weight
    "critic.optimizer.weight_decay=0",
    "cluster.trainers=1",
    "megatron.expert_parallel=1",
]
TWO_CRITICS = ["critic.trainers=2", "critic.megatron.tensor_parallel=2"]


def train(data: Path, runs: Path, name: str, *more: str) -> list[dict[str, float]]:
    arguments = settings(data, runs, name, *PPO, *more)
    done = run("train", "recipes/quickstart_ppo.yaml", *arguments, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    return metrics(runs / name)


@pytest.fixture(scope="module")
def ppo(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with the actor in one process and the critic in two, tensor parallel; the first warms up."""
    runs = tmp_path_factory.mktemp("runs")
    train(quickstart_data, runs, "ppo", *TWO_CRITICS)
    return runs / "ppo"


@pytest.mark.slow  # PPO itself is in tests/runs/test_tiny_recipes.py
def test_only_the_critic_is_updated_in_the_warm_up(ppo: Path, quickstart_data: Path, tmp_path: Path) -> None:
    first, second, third = metrics(ppo)
    for line in (first, second, third):
        for name in (
            "critic/vf_loss", "critic/vf_clipfrac", "critic/values/mean", "critic/returns/mean", "critic/grad_norm",
            "critic/lr", "critic/vf_explained_var", "critic/rewards/mean", "rollout/logprob_gap_mean",
            "timing_s/values", "timing_s/adv", "timing_s/update_critic",
        ):  # fmt: skip
            assert name in line, name
        assert line["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)
        assert line["critic/advantages/min"] < 0 < line["critic/advantages/max"]
        assert line["rollout/logprob_gap_mean"] < 1e-4, "the engine has the weights of the trainer"
    assert "actor/pg_loss" not in first and "timing_s/update_actor" not in first
    for line in (second, third):
        assert line["actor/grad_norm"] > 0 and line["actor/skipped_updates"] == 0
    assert third["critic/vf_loss"] < first["critic/vf_loss"], "the critic's loss does not decrease"

    actor = export(ppo, tmp_path / "actor", step=1)
    start = load_file(quickstart_data / "model" / "model.safetensors")
    assert all(torch.equal(actor[name], weight) for name, weight in start.items()), "the policy has moved"
    critic = export(ppo, tmp_path / "critic", "--critic", step=1, processes=2)
    assert critic["score.weight"].shape == (1, start["model.norm.weight"].shape[0])
    moved = [name for name in start if name in critic and not torch.equal(critic[name], start[name])]
    assert "model.norm.weight" in moved and "model.embed_tokens.weight" in moved


def export(run_dir: Path, out: Path, *more: str, step: int, processes: int = 1) -> dict[str, torch.Tensor]:
    arguments = ("export", str(run_dir), "--out", str(out), "--step", str(step), *more)
    done = run(*arguments, torchrun=processes)
    assert done.returncode == 0 and "bit for bit" in done.stdout, done.stderr + done.stdout
    return load_file(out / "model.safetensors")


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(ppo: Path, quickstart_data: Path, tmp_path: Path) -> None:
    """Both models and optimizers resume from the checkpoint after the first policy update."""
    resume = f"train.resume={ppo / 'checkpoints' / 'step_000002'}"
    rest = train(quickstart_data, tmp_path, "rest", *TWO_CRITICS, resume)
    # The resumed run's first line has the weight sync that it began with.
    (line,), (expected,) = without_times(rest), without_times(metrics(ppo)[2:])
    assert {name: line[name] for name in line if not name.startswith("weight_sync/")} == expected


@pytest.mark.slow
def test_metrics_do_not_depend_on_the_layouts_of_actor_and_critic(
    ppo: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    """Two data-parallel actors and critics with different micro batches: each critic sends advantages to each actor."""
    more = [
        "cluster.trainers=2", "megatron.expert_parallel=2", "critic.trainers=2", "critic.megatron.expert_parallel=2",
        "critic.max_tokens_per_micro_batch=200", "actor.max_tokens_per_micro_batch=300", "train.steps=2",
        "actor.optimizer.decay_steps=10",
    ]  # fmt: skip
    lines = train(quickstart_data, tmp_path, "other", *more)
    assert len(lines) == 2
    for line, expected in zip(lines, metrics(ppo), strict=False):
        for name, value in expected.items():
            if name.startswith(("critic/", "actor/")) and name != "actor/micro_batches":
                assert line[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
