"""A judge on the real stack: the tiny random model judges its samples in a separate engine."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.stack import metrics, run
from tests.support.training_runs import Run, assert_ended, descendants, pid_in_log, settings

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def judging(data: Path, folder: Path, *more: str) -> list[str]:
    """Settings of the judge. Any text with a digit that ends is a verdict; a random model writes one after some attempts."""
    model = folder / "judge_model"
    shutil.copytree(data / "model", model)
    ends = [2, *range(300, 309)]  # otherwise the length limit cuts most verdicts
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return [
        f"judge.path={model}", "judge.prompt='Grade {{ response }} of {{ prompt }} ({{ ground_truth }}).'",
        "judge.pattern='([0-9])'", "judge.scale=9", "judge.max_prompt_length=200", "judge.max_tokens=128", "judge.attempts=20",
        "judge.temperature=1", "judge.engine_args={kv_cache_memory_bytes: 67108864, max_num_seqs: 16}", *more,
    ]  # fmt: skip


SUM = ["reward.function=null", "reward.functions={tests.support.scorers:letters: 1.0, judge: 0.5}"]
SMALL = [
    "train.steps=2", "cluster.trainers=1", "megatron.expert_parallel=1", "algorithm.dynamic_sampling.enabled=false",
    "train.save_every=0", "train.save_at_end=false", "evaluation.greedy=false",
]  # fmt: skip
WITHOUT_EVALUATION = ["evaluation.at_start=false", "evaluation.at_end=false"]


def test_training_uses_judged_rewards(quickstart_data: Path, tmp_path: Path) -> None:
    arguments = settings(
        quickstart_data, tmp_path, "judged", *SMALL, *WITHOUT_EVALUATION, *judging(quickstart_data, tmp_path), *SUM
    )
    done = run("train", "recipes/quickstart.yaml", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    for line in metrics(tmp_path / "judged"):
        judged, letters = line["critic/score/judge/mean"], line["critic/score/letters/mean"]
        assert 0 < judged < 1 and line["rollout/judge_seconds"] > 0
        assert line["critic/rewards/mean"] == pytest.approx(letters + 0.5 * judged)
        assert line["rollout/groups_unscored"] == 0 and line["actor/grad_norm"] > 0
    samples = [json.loads(line) for line in (tmp_path / "judged" / "samples" / "step_000001.jsonl").open()]
    for sample in samples:
        assert set(sample["parts"]) == {"letters", "letters/accuracy", "accuracy", "judge"}
        assert math.isclose(sample["parts"]["judge"] * 9, round(sample["parts"]["judge"] * 9), abs_tol=1e-9)
    assert len({sample["parts"]["judge"] for sample in samples}) > 1


def test_a_judge_alone_gives_the_reward_under_torchrun(quickstart_data: Path, tmp_path: Path) -> None:
    """A judge with two engines gives the complete reward, in training and in `megarl eval`."""
    alone = [*judging(quickstart_data, tmp_path), "reward.function=judge", "judge.engines=2", "judge.right_from=0.5"]
    arguments = settings(quickstart_data, tmp_path, "alone", *SMALL, *alone)
    done = run("train", "recipes/quickstart.yaml", *arguments, torchrun=1)
    assert done.returncode == 0, done.stderr + done.stdout
    before, line, after = metrics(tmp_path / "alone")
    for evaluation in (before, after):  # four random verdicts each
        assert_right_from_half(evaluation["eval/pass@1"], evaluation["eval/rewards/mean"])
    assert_right_from_half(line["critic/score/accuracy/mean"], line["critic/rewards/mean"])
    assert 0 < line["critic/rewards/mean"] < 1 and line["rollout/judge_seconds"] > 0
    assert 0 < line["critic/score/accuracy/mean"] < 1 and "critic/score/judge/mean" not in line
    assert {path.stem for path in (tmp_path / "alone" / "logs").glob("judge*.log")} == {"judge0", "judge1"}
    done = run("eval", "recipes/quickstart.yaml", *arguments, "name=evaluated")
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert_right_from_half(result["eval/pass@1"], result["eval/rewards/mean"])


def assert_right_from_half(accuracy: float, reward: float) -> None:
    """Of ten grades, 5/9 and more are right: the mean reward is within the bounds that the share of right answers gives."""
    least, most = 5 / 9 * accuracy, accuracy + 4 / 9 * (1 - accuracy)
    assert 0 < reward <= most + 1e-9 and reward >= least - 1e-9


def test_a_killed_judge_ends_the_run_and_is_named(quickstart_data: Path, tmp_path: Path) -> None:
    training = Run(quickstart_data, tmp_path, "killed", *judging(quickstart_data, tmp_path), *SUM)
    try:
        training.wait_for_steps(1)
        processes = descendants(training.process.pid)
        os.kill(pid_in_log(training.directory, "judge0"), signal.SIGKILL)
        status, errors = training.end(30)
    finally:
        training.process.kill()
    assert status == 1
    assert "judge0" in errors and "SIGKILL" in errors and "Traceback" not in errors
    assert_ended(processes)
