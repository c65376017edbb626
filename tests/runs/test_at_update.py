"""Runs in which requests take new weights while they run: lag, log-probs by version, resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.commands.data.tiny_model import make_tiny_model
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import read_samples
from tests.support.stack import metrics
from tests.support.training_runs import train

pytestmark = pytest.mark.stack

# Three batches of requests of up to 64 tokens are under way, 8 at a time: updates and saves meet some of them.
AHEAD = [
    "cluster.trainers=1",
    "megatron.expert_parallel=1",
    "cluster.placement=disaggregated",
    "rollout.max_staleness=2",
    "rollout.max_response_length=64",
    "rollout.engine_args.max_num_seqs=8",
    "evaluation.at_start=false",
    "train.steps=5",
]
LARGEST_LAG = 2 + 1  # of the window, which is 0.3 x 3 x 4 prompts = 3 groups
EXACT = 1e-4  # mean gap between trainer and engine, with the same weights


@pytest.fixture(scope="module")
def refreshed(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    done = train(quickstart_data, runs, "refreshed", *AHEAD, "actor.optimizer.lr=1e-2")
    assert done.returncode == 0, done.stderr + done.stdout
    return runs / "refreshed"


def check_gaps(directory: Path) -> None:
    """Tokens of the trained policy have its log-probs; older ones differ."""
    gaps: dict[str, list[float]] = {}
    for line in metrics(directory):
        for name, value in line.items():
            if "logprob_gap_by_lag/" in name:
                gaps.setdefault(name.rpartition("/")[2], []).append(value)
    assert max(gaps.pop("0")) < EXACT
    assert gaps and min(map(max, gaps.values())) > EXACT


@pytest.mark.slow
def test_requests_continue_with_refreshed_caches(refreshed: Path) -> None:
    lines = metrics(refreshed)
    assert max(line["rollout/spans_mean"] for line in lines) > 1, "no update met a running request"
    assert 1 <= max(line["rollout/staleness_max"] for line in lines) <= LARGEST_LAG
    check_gaps(refreshed)
    records = [record for step in range(1, 6) for record in read_samples(RunDirectory(refreshed), step)]
    spans = [record["spans"] for record in records if "spans" in record]
    assert spans and all(each[0][0] == 0 and each == sorted(each) for each in spans)


@pytest.mark.slow
def test_a_resumed_run_continues_unfinished_groups(refreshed: Path, quickstart_data: Path, tmp_path: Path) -> None:
    """Tokens of the checkpoint keep their log-probs and versions, and the resumed policy samples the rest."""
    for step in (1, 2, 3):  # saved while groups ran
        checkpoint = refreshed / "checkpoints" / f"step_{step:06}"
        begun = json.loads((checkpoint / "controller.json").read_text())["source"]["begun"]
        saved_tokens = sum(sample["tokens"] for group in begun for sample in group["samples"])
        if saved_tokens:
            break
    assert saved_tokens, "no group ran during a save"
    done = train(quickstart_data, tmp_path, "rest", *AHEAD, "actor.optimizer.lr=1e-2", f"train.resume={checkpoint}")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "rest")
    assert [line["step"] for line in lines] == list(range(step + 1, 6))
    assert [line.get("rollout/tokens_taken_over", 0) for line in lines] == [saved_tokens] + [0] * (4 - step)
    assert all(line["rollout/staleness_max"] <= LARGEST_LAG for line in lines)
    check_gaps(tmp_path / "rest")


@pytest.mark.slow
def test_requests_continue_with_kept_caches(quickstart_data: Path, tmp_path: Path) -> None:
    """The new policy reads the KV cache of the old one, so that log-probs of the current version differ, too."""
    done = train(quickstart_data, tmp_path, "kept", *AHEAD, "actor.optimizer.lr=1e-2", "rollout.at_update=keep")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "kept")
    assert max(line["rollout/spans_mean"] for line in lines) > 1
    assert max(line["rollout/staleness_max"] for line in lines) <= LARGEST_LAG
    assert max(line.get("rollout/logprob_gap_by_lag/0", 0.0) for line in lines) > EXACT, "the KV cache was recomputed"


@pytest.mark.slow
def test_each_engine_finishes_its_requests_before_it_loads_weights(quickstart_data: Path, tmp_path: Path) -> None:
    """A sample has one version, and an evaluation the newest. Two engines load in turn."""
    engines = ["rollout.engines=2", "rollout.at_update=finish", "evaluation.every=2"]
    done = train(quickstart_data, tmp_path, "finished", *AHEAD, "actor.optimizer.lr=1e-2", *engines)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "each engine keeps new weights in host memory" in done.stdout
    lines = metrics(tmp_path / "finished")
    assert max(line["rollout/spans_mean"] for line in lines) == 1
    assert 1 <= max(line["rollout/staleness_max"] for line in lines) <= LARGEST_LAG
    check_gaps(tmp_path / "finished")
    assert [line["step"] for line in lines if "eval/pass@1" in line] == [2, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["refresh", "keep", "finish"])
def test_running_requests_take_new_adapters(quickstart_data: Path, tmp_path: Path, rule: str) -> None:
    """Engines of a dense model receive only adapters. Their first update brings the model's weights as well."""
    make_tiny_model("qwen3", tmp_path / "model", seed=0)
    adapters = ["lora.rank=4", f"model.path={tmp_path}/model", f"rollout.at_update={rule}"]
    done = train(quickstart_data, tmp_path, "adapters", *AHEAD, "actor.optimizer.lr=3e-2", *adapters)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "adapters")
    spans = max(line["rollout/spans_mean"] for line in lines)
    assert spans == 1 if rule == "finish" else spans > 1
    assert 1 <= max(line["rollout/staleness_max"] for line in lines) <= LARGEST_LAG
    if rule == "keep":
        assert max(line.get("rollout/logprob_gap_by_lag/0", 0.0) for line in lines) > EXACT
    else:
        check_gaps(tmp_path / "adapters")


@pytest.mark.slow
def test_requests_wait_while_colocated_trainers_compute(quickstart_data: Path, tmp_path: Path) -> None:
    """A batch is trained as soon as its samples are finished; longer ones of the next batches continue afterwards."""
    colocated = ["cluster.placement=colocated", "rollout.max_staleness=1", "rollout.window=0.5"]
    done = train(quickstart_data, tmp_path, "colocated", *AHEAD, "actor.optimizer.lr=1e-2", *colocated)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "colocated")
    assert max(line["rollout/spans_mean"] for line in lines) > 1, "no update met a waiting request"
    assert 1 <= max(line["rollout/staleness_max"] for line in lines) <= 2
    check_gaps(tmp_path / "colocated")
