"""Every algorithm's recipe on the real stack: trainers, engines, critic and teacher run it, and it learns.

The task suits a random model: write letters. docs/algorithms.md has the results on the quickstart's word
problems (benchmarks/learning.py)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl import load_recipe
from megarl.data.rows import write_parquet
from tests.support.stack import ROOT, metrics, run
from tests.support.training_runs import settings

pytestmark = pytest.mark.stack

STEPS = 6
IN_CI = ("ppo",)  # the shape with a critic; quickstart.yaml, without one, is DAPO and runs in test_train.py
OF_DATA = {"sft", "lora_sft", "dpo"}  # samples are the answers of a data set
OF_A_TEACHER = {"gkd": "actor/pg_loss", "on_policy_distillation": "actor/reward_kl_penalty"}
"""Recipes with a teacher, and the metric that each minimizes."""
RECIPES = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in IN_CI else [pytest.mark.slow])
    for path in sorted((ROOT / "recipes" / "tiny").glob("*.yaml"))
    if path.stem not in {*OF_DATA, *OF_A_TEACHER}
]
SMALL = [
    "train.steps=2", "evaluation.at_start=false", "evaluation.at_end=false", "evaluation.greedy=false", "train.save_every=0",
    "train.save_at_end=false", "cluster.trainers=1", "megatron.expert_parallel=1",
]  # fmt: skip
LEARNING = [
    "data.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.engine_args.max_num_seqs=64",
    "actor.optimizer.lr=2e-2",
    "actor.optimizer.warmup_steps=0",
]
# Metrics of every step that show that the algorithm was active.
SIGNS = {
    "clip_cov": ["actor/cov_selected"],
    "m2po": ["actor/second_moment", "actor/second_moment_excluded"],
    "kl_cov": ["actor/cov_selected"],
    "grpo": ["actor/kl_loss"],
    "remax": ["critic/rewards/greedy", "actor/reward_kl_penalty"],
    "rloo": ["actor/reward_kl_penalty"],
    "reinforce_plus_plus": ["actor/reward_kl_penalty", "critic/advantages/mean"],
    "ppo_kl_in_reward": ["actor/reward_kl_penalty", "critic/vf_loss", "actor/kl_weight"],
    "gkd": ["actor/distill_mass", "timing_s/teacher"],
    "on_policy_distillation": ["actor/reward_kl_penalty", "critic/advantages/mean", "timing_s/teacher"],
    "dpo": ["actor/dpo_accuracy", "actor/dpo_margin"],
}


def check(lines: list[dict[str, float]], name: str, source: str = "rollout") -> None:
    for line in lines:
        numbers = {key: value for key, value in line.items() if isinstance(value, float)}
        assert all(math.isfinite(value) for value in numbers.values()), line
        assert not line.get("actor/skipped_updates") and not line.get("critic/skipped_updates")
        signs = SIGNS.get(name, [])
        assert set(signs) <= line.keys(), name
        if source == "rollout":
            assert line["rollout/logprob_gap_max"] < 1e-3


# Overrides in addition to `settings`.
OWN = {
    "pass_at_k": ["reward.function=tests.support.scorers:mostly_letters"],  # a reward above 0 counts as correct
    # One sample of each prompt, as in its recipe; the greedy sample is a second.
    "remax": ["algorithm.kl_coef=0.001", "train.steps=20", "data.prompts_per_step=64", "rollout.samples_per_prompt=1"],
    "dro": ["train.steps=14"],  # its penalty holds the policy back within a step
    "gdpo": ["reward.function=tests.support.scorers:graded_letters", "algorithm.overlong.penalty_buffer=4"],
    "gspo": ["train.steps=14"],  # its clip bounds mask most tokens after a step's first mini batch
    "ppo": ["critic.warmup_steps=1", f"train.steps={STEPS + 1}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_raises_the_letters_reward(recipe: Path, quickstart_data: Path, tmp_path: Path) -> None:
    name = recipe.stem
    arguments = settings(
        quickstart_data, tmp_path, "tiny", *SMALL, f"train.steps={STEPS}", *LEARNING, *OWN.get(name, [])
    )
    done = run("train", f"recipes/tiny/{recipe.name}", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "tiny")
    check(lines, name)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)) and len(lines) >= STEPS
    assert any(line.get("actor/grad_norm", 0) > 0 for line in lines)
    rewards = [line["rollout/rewards/mean"] for line in lines]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1, rewards


@pytest.mark.slow
def test_ppo_with_the_kl_in_the_reward(quickstart_data: Path, tmp_path: Path) -> None:
    """The actor's processes send each token's KL to the critic; a resumed run keeps the adapted KL weight."""
    kl = ["algorithm.kl_coef=0.2", "algorithm.kl_in_reward=true", "algorithm.kl_target=0.01", "algorithm.kl_horizon=64"]
    more = [
        *SMALL,
        *kl,
        "train.steps=3",
        "critic.warmup_steps=1",
        "train.save_every=1",
        "critic.trainers=2",
        "critic.megatron.expert_parallel=2",
    ]
    done = run("train", "recipes/quickstart_ppo.yaml", *settings(quickstart_data, tmp_path, "ppo", *more))
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "ppo")
    check(lines, "ppo_kl_in_reward")
    # The first step is critic warm-up, so that the KL before the second step's update is 0, too. The KL weight then falls
    # by the largest amount, 0.2 * 16 samples / 64.
    assert [line["actor/kl_weight"] for line in lines] == pytest.approx([0.2, 0.2, 0.2 * 0.95])
    assert lines[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert lines[2]["actor/reward_kl_penalty"] > 0
    resume = f"train.resume={tmp_path / 'ppo' / 'checkpoints' / 'step_000002'}"
    done = run("train", "recipes/quickstart_ppo.yaml", *settings(quickstart_data, tmp_path, "rest", *more, resume))
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = metrics(tmp_path / "rest")
    assert line["actor/kl_weight"] == lines[2]["actor/kl_weight"] and line["actor/loss"] == lines[2]["actor/loss"]


@pytest.mark.slow
def test_a_resumed_run_has_the_refreshed_reference(quickstart_data: Path, tmp_path: Path) -> None:
    """The reference policy is refreshed after steps 2 and 4; a run that resumes after step 3 has the same numbers."""
    more = [
        *SMALL, *LEARNING, "train.steps=5", "train.save_every=3", "algorithm.refresh_reference_every=2",
        "actor.mini_batches=1",
    ]  # fmt: skip
    for name, overrides in (
        ("whole", more),
        ("rest", [*more, f"train.resume={tmp_path / 'whole' / 'checkpoints' / 'step_000003'}"]),
    ):
        done = run("train", "recipes/tiny/grpo.yaml", *settings(quickstart_data, tmp_path, name, *overrides))
        assert done.returncode == 0, done.stderr + done.stdout
    whole, rest = metrics(tmp_path / "whole"), metrics(tmp_path / "rest")
    check(whole, "grpo")
    assert "step 4: the reference policy is now the policy of this step" in done.stdout
    assert [line["actor/reference_step"] for line in whole] == [0, 0, 2, 2, 4]
    kl = [line["actor/kl"] for line in whole]
    assert kl[1] > 0, "the second step compares with the weights before training"
    assert kl[2] < 1e-9 and kl[4] < 1e-9, "right after a refresh, before the update, the policies are equal"
    of_the_numbers = ("actor/reference_step", "actor/kl", "actor/loss", "actor/grad_norm", "rollout/rewards/mean")
    assert [[line[name] for name in of_the_numbers] for line in rest] == [
        [line[name] for name in of_the_numbers] for line in whole[3:]
    ]


@pytest.fixture(scope="module")
def teacher(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model after some SFT."""
    runs = tmp_path_factory.mktemp("teacher")
    arguments = [
        f"model.path={quickstart_data}/model", f"data.train_files=[{quickstart_data}/data/sft.parquet]", f"runs_dir={runs}",
        "name=teacher", "train.steps=100", "train.save_at_end=false", "train.export_at_end=true",
    ]  # fmt: skip
    done = run("train", "recipes/quickstart_sft.yaml", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    return runs / "teacher" / "hf"


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_TEACHER)
def test_distillation_reduces_the_distance_to_the_teacher(
    name: str, teacher: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    arguments = settings(
        quickstart_data, tmp_path, "tiny", *SMALL, "train.steps=12", *LEARNING, f"teacher.path={teacher}"
    )
    done = run("train", f"recipes/tiny/{name}.yaml", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "tiny")
    check(lines, name)
    distances = [line[OF_A_TEACHER[name]] for line in lines]
    assert distances[0] > 1 and distances[-1] < distances[0] * 2 / 3, distances


@pytest.mark.slow
def test_each_data_source_has_its_teacher(teacher: Path, quickstart_data: Path, tmp_path: Path) -> None:
    """Half of the rows get the initial model as their teacher, to which the policy has no distance in the first step."""
    rows = [
        json.loads(json.dumps(row, default=str))
        for row in pq.read_table(quickstart_data / "data/train.parquet").to_pylist()
    ]
    for number, row in enumerate(rows):
        row["data_source"] = ("openai/gsm8k", "megarl/word_problems")[number % 2]  # the same scorer
    write_parquet(tmp_path / "both.parquet", rows)
    losses = {}
    for name, other in (("both", quickstart_data / "model"), ("same", teacher)):
        sources = f"{{openai/gsm8k: {{path: {teacher}}}, megarl/word_problems: {{path: {other}}}}}"
        more = [f"data.train_files=[{tmp_path}/both.parquet]", "teacher.path=null", f"teacher.by_source={sources}"]
        arguments = settings(quickstart_data, tmp_path, name, *SMALL, *LEARNING, "train.steps=1", *more)
        done = run("train", "recipes/tiny/gkd.yaml", *arguments)
        assert done.returncode == 0, done.stderr + done.stdout
        losses[name] = metrics(tmp_path / name)[-1]["actor/pg_loss"]
    assert 0.2 * losses["same"] < losses["both"] < 0.8 * losses["same"], losses


STEP_REWARDS = {
    "grpo_process": ["grpo_process", "algorithm.kl_coef=0"],
    "reinforce_plus_plus": ["reinforce_plus_plus", "algorithm.gamma=0.99"],
    "ppo": ["ppo", "algorithm.gamma=0.99", "critic.optimizer.lr=1e-3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEP_REWARDS)
def test_rewards_of_steps(name: str, quickstart_data: Path, tmp_path: Path) -> None:
    """A user's scorer gives step rewards, and the policy learns to earn more of them."""
    base, *more = STEP_REWARDS[name]
    bases = [f"{ROOT}/recipes/base/{base_name}.yaml" for base_name in ("word_problems", base)]
    (tmp_path / "steps.yaml").write_text(json.dumps({"base": bases, "name": "steps"}))
    more += [
        "reward.function=tests.support.scorers:pieces",
        "train.steps=12",
        "data.prompts_per_step=8",
        "rollout.samples_per_prompt=8",
    ]
    arguments = settings(quickstart_data, tmp_path, "steps", *SMALL, *more)
    done = run("train", str(tmp_path / "steps.yaml"), *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "steps")
    check(lines, name)
    for line in lines:
        assert line["critic/score/steps/mean"] <= line["critic/rewards/mean"] + 1e-9
        assert 1 <= line["critic/step_count/mean"] <= 16
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    earned = [line["critic/score/steps/mean"] for line in lines]
    assert sum(earned[-3:]) > sum(earned[:3]), earned
    (sample, *_) = [json.loads(line) for line in (tmp_path / "steps" / "samples" / "step_000001.jsonl").open()]
    assert sum(reward for _, reward in sample["steps"]) == pytest.approx(sample["parts"]["steps"])
    assert all(0 <= token < sample["response_length"] for token, _ in sample["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OF_DATA))
def test_held_out_loss_decreases(quickstart_data: Path, tmp_path: Path, name: str) -> None:
    """The recipes run as they are, but from the random model. Held-out metrics of pairs show that the policy learns to
    prefer worked solutions."""
    recipe = load_recipe(ROOT / "recipes" / "tiny" / f"{name}.yaml")
    files = {
        f"data.{key}": [str(quickstart_data / Path(file).relative_to("data/quickstart")) for file in files]
        for key, files in (("train_files", recipe.data.train_files), ("eval_files", recipe.data.eval_files))
    }
    arguments = [
        *(f"{key}=[{','.join(paths)}]" for key, paths in files.items()), f"model.path={quickstart_data}/model",
        f"runs_dir={tmp_path}", f"name={name}", "train.steps=12", "evaluation.every=6", "train.save_at_end=false",
    ]  # fmt: skip
    if name == "dpo":
        arguments += ["actor.optimizer.lr=5e-3", "actor.optimizer.warmup_steps=0"]
    done = run("train", f"recipes/tiny/{name}.yaml", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / name)
    check(lines[1:], name, source=recipe.train.source)
    first, between, last = (line["eval/loss"] for line in lines if "eval/loss" in line)
    assert last < between < first
    if name == "dpo":
        assert first == pytest.approx(math.log(2), abs=1e-6) and lines[0]["eval/dpo_margin"] == pytest.approx(
            0, abs=1e-5
        )
        assert last < 0.5 and lines[-1]["eval/dpo_accuracy"] > 0.8
    else:
        assert last < first - 1
