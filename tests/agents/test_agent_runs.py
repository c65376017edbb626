"""An agent loop on the real stack: after demonstrations of mixed quality, a policy learns to call its tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import read_samples
from tests.support.agent_task import TOOL, write_demonstrations, write_prompts, write_verls_tool
from tests.support.stack import metrics, run

pytestmark = [pytest.mark.stack, pytest.mark.slow]

COMMON = [
    "data.chat_template=true",
    "data.max_prompt_length=96",
    "rollout.max_response_length=128",
    "cluster.trainers=1",
    "megatron.expert_parallel=1",
    "train.save_at_end=false",
]
STEPS = 10


@pytest.fixture(scope="module")
def taught(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model after SFT: it calls the tool and repeats its answer in half of the samples, and else guesses."""
    folder = tmp_path_factory.mktemp("taught")
    write_demonstrations(folder / "sft.parquet", 4000)
    overrides = [
        f"model.path={quickstart_data}/model",
        f"data.train_files=[{folder}/sft.parquet]",
        f"runs_dir={folder}",
    ]
    more = ["name=taught", "train.steps=300", "train.export_at_end=true"]
    done = run("train", "recipes/quickstart_sft.yaml", *COMMON, *overrides, *more)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder / "taught" / "hf"


def settings(taught: Path, runs: Path, *more: str) -> list[str]:
    write_prompts(runs / "train.parquet", 256)
    write_prompts(runs / "test.parquet", 64, seed=5)
    return [
        *COMMON,
        f"model.path={taught}",
        f"data.train_files=[{runs}/train.parquet]",
        f"data.eval_files=[{runs}/test.parquet]",
        f"runs_dir={runs}",
        "name=agent",
        "data.prompts_per_step=16",
        "rollout.engine_args.max_num_seqs=128",
        f"agent.tools=[{TOOL}]",
        "agent.max_turns=3",
        "agent.processes=2",
        "reward.function=tests.support.scorers:last_turn",
        "reward.processes=1",
        "evaluation.greedy=false",
        *more,
    ]


def test_training_raises_rewards_and_tool_calls(taught: Path, tmp_path: Path) -> None:
    """Only the tool knows the answer; a guess is right one time in ten."""
    done = run("train", "recipes/tiny/grpo.yaml", *settings(taught, tmp_path, f"train.steps={STEPS}"))
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line for line in metrics(tmp_path / "agent") if line["step"] > 0]
    assert len(lines) == STEPS
    # A trained token of a tool's answer, or a turn tokenized again, would cause a log-prob gap.
    assert all(line["rollout/logprob_gap_max"] < 1e-3 for line in lines)
    rewards = [line["rollout/rewards/mean"] for line in lines]
    calls = [line["agent/calls/mean"] for line in lines]
    assert rewards[0] < 0.7 and sum(rewards[-2:]) / 2 > rewards[0] + 0.2, rewards
    assert calls[-1] > calls[0] + 0.2, calls
    assert all(line["agent/turns/max"] <= 3 for line in lines)
    records = read_samples(RunDirectory(tmp_path / "agent"), STEPS)
    successful = [record for record in records if len(record["turns"]) == 3 and record["reward"] == 1.0]
    assert successful, records[:2]
    first, tool, last = successful[0]["turns"]
    assert (first["role"], tool["role"], last["role"]) == ("assistant", "tool", "assistant")
    assert tool["name"] == "find_digit" and tool["text"] == last["text"]
    assert successful[0]["reason"] == f"it said {last['text']!r}"
    assert "find_digit" in (tmp_path / "agent" / "report.html").read_text()


def test_a_run_with_tools_resumes_with_the_waiting_groups(taught: Path, tmp_path: Path) -> None:
    """With staleness 1, groups with turns wait in the checkpoint. Their batches depend on the tool's time, so losses may
    differ from an uninterrupted run; counts are equal."""
    ahead = [
        "rollout.max_staleness=1",
        "rollout.at_update=drain",
        "train.save_every=1",
        "train.keep_checkpoints=9",
        "train.steps=2",
    ]
    overrides = [*settings(taught, tmp_path, *ahead), "cluster.placement=disaggregated"]
    done = run("train", "recipes/tiny/grpo.yaml", *overrides)
    assert done.returncode == 0, done.stderr + done.stdout
    saved = json.loads((tmp_path / "agent" / "checkpoints" / "step_000001" / "controller.json").read_text())
    waiting = [item for batch in saved["source"]["gathered"] for item in batch]
    assert waiting and any(words["turns"] for item in waiting for words in item["words"])
    resumed = run("train", "recipes/tiny/grpo.yaml", *overrides, "train.resume=auto", "train.steps=3")
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert [line["step"] for line in metrics(tmp_path / "agent") if line["step"] > 0] == [1, 2, 3]


@pytest.mark.parametrize("rule", ["refresh", "keep", "finish"])
def test_samples_with_tools_take_new_weights(taught: Path, tmp_path: Path, rule: str) -> None:
    """Between and within turns; with finish, after all turns. Tokens keep the log-probs of the weights that sampled them."""
    ahead = ["rollout.max_staleness=2", "cluster.placement=disaggregated", "train.steps=6", f"rollout.at_update={rule}"]
    ahead.append(
        "rollout.engine_args.max_num_seqs=16"
    )  # of 128 samples a step: the engine is busy when the weights change
    done = run("train", "recipes/tiny/grpo.yaml", *settings(taught, tmp_path, *ahead))
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line for line in metrics(tmp_path / "agent") if line["step"] > 0]
    assert max(line["agent/turns/max"] for line in lines) > 1
    spans = max(line["rollout/spans_mean"] for line in lines)
    assert spans == 1 if rule == "finish" else spans > 1
    same = [line["rollout/logprob_gap_by_lag/0"] for line in lines if "rollout/logprob_gap_by_lag/0" in line]
    if rule != "keep":  # a kept KV cache is of older weights
        assert same and max(same) < 1e-4
    assert max(line.get("rollout/logprob_gap_by_lag/1", 0.0) for line in lines) > 1e-4


def test_evaluation_with_tools_under_torchrun(taught: Path, tmp_path: Path) -> None:
    """The rollout process is another kind of child under torchrun."""
    overrides = settings(taught, tmp_path, "evaluation.limit=32")
    done = run("eval", "recipes/tiny/grpo.yaml", *overrides, torchrun=1)
    assert done.returncode == 0, done.stderr + done.stdout
    metrics = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert 0.3 < metrics["eval/pass@1"] <= 1.0


def test_a_tool_of_verl_keeps_its_state_within_a_sample(taught: Path, tmp_path: Path) -> None:
    """Rewards depend on the sample's earlier calls, are part of its reward, and every instance is released once."""
    tool = f"agent.tools=[{write_verls_tool(tmp_path)}]"
    overrides = settings(taught, tmp_path, tool, "agent.max_turns=4", "train.steps=2")
    done = run("train", "recipes/tiny/grpo.yaml", *overrides)
    assert done.returncode == 0, done.stderr + done.stdout
    records = read_samples(RunDirectory(tmp_path / "agent"), 1)
    called = [record for record in records if any(turn["role"] == "tool" for turn in record["turns"])]
    assert called, records[:2]
    for record in called:
        ran = [turn for turn in record["turns"] if turn["role"] == "tool" and "failure" not in turn]
        of_calls = [turn.get("reward", 0.0) for turn in ran]
        assert of_calls == [0.25, *[-0.125] * (len(of_calls) - 1)]
        scored = record["reward"] - sum(of_calls) - (1 / 16 if of_calls else 0.0)
        assert scored == pytest.approx(round(scored)) and 0 <= round(scored) <= 1, record
    log = (tmp_path / "digits").read_text().split("\n")[:-1]
    created = sorted(line.split()[1] for line in log if line.startswith("create"))
    assert created == sorted(line.split()[1] for line in log if line.startswith("release"))
    assert len(created) >= len(called)


def test_a_user_replies_to_the_policy(quickstart_data: Path, tmp_path: Path) -> None:
    """The reply is in the context of the next turn and not in the loss; it rewards the turn before it."""
    write_prompts(tmp_path / "train.parquet", 64)
    overrides = [
        *COMMON,
        f"model.path={quickstart_data}/model",
        f"data.train_files=[{tmp_path}/train.parquet]",
        "data.eval_files=[]",
        f"runs_dir={tmp_path}",
        "name=talk",
        "data.prompts_per_step=16",
        "rollout.engine_args.max_num_seqs=128",
        "agent.interaction=tests.support.interactions:Examiner",
        "agent.processes=2",
        "reward.function=tests.support.scorers:last_turn",
        "reward.processes=1",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "evaluation.greedy=false",
        "train.steps=2",
    ]
    done = run("train", "recipes/tiny/grpo.yaml", *overrides)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line for line in metrics(tmp_path / "talk") if line["step"] > 0]
    assert all(line["rollout/logprob_gap_max"] < 1e-3 for line in lines)
    records = read_samples(RunDirectory(tmp_path / "talk"), 1)
    talks = [record for record in records if any(turn["role"] == "user" for turn in record["turns"])]
    assert talks, "a random model ends some turns"
    for record in talks:
        replies = [turn for turn in record["turns"] if turn["role"] == "user"]
        assert [turn["text"] for turn in replies] == [f"Again, please ({n + 1})" for n in range(len(replies))]
        assert sum(reward for _, reward in record["steps"]) == 0.25 * len(replies)
        assert record["tool_use"]["calls"] == 0 and record["tool_use"]["turns"] >= len(replies)


def test_a_loop_of_the_user_trains(quickstart_data: Path, tmp_path: Path) -> None:
    """Its reward rises, tokens between its turns are not trained on, and log-probs are the engine's."""
    write_prompts(tmp_path / "train.parquet", 64)
    overrides = [
        *COMMON,
        f"model.path={quickstart_data}/model",
        f"data.train_files=[{tmp_path}/train.parquet]",
        "data.eval_files=[]",
        f"runs_dir={tmp_path}",
        "name=own",
        "data.prompts_per_step=8",
        "rollout.engine_args.max_num_seqs=128",
        "agent.loop=tests.support.agent_loops:EvenTokens",
        "agent.loop_arguments={length: 8}",
        "agent.processes=2",
        "reward.function=unscored",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "evaluation.greedy=false",
        "actor.optimizer.lr=1e-3",
        "train.steps=14",
    ]
    done = run("train", "recipes/tiny/grpo.yaml", *overrides)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line for line in metrics(tmp_path / "own") if line["step"] > 0]
    # A trained token between the turns, or a log-prob of another request, would cause a gap.
    assert all(line["rollout/logprob_gap_max"] < 1e-3 for line in lines)
    rewards = [line["rollout/rewards/mean"] for line in lines]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    records = read_samples(RunDirectory(tmp_path / "own"), 14)
    for record in records:
        assert [turn["role"] for turn in record["turns"]] == ["assistant", "user", "assistant"]
        assert "Go on" in record["turns"][1]["text"] and record["reward"] <= 1.0
        assert record["response_length"] == sum(turn["tokens"] for turn in record["turns"])
        assert record["tool_use"]["calls"] == 0 and record["tool_use"]["turns"] == 2
