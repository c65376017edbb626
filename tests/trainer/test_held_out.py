"""The loss on held-out rows: exact for any split and layout, without an effect on training."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import held_out_metrics
from megarl.data.sft import Example
from megarl.recipe.schema import Recipe
from megarl.trainer.group import ActorGroup
from megarl.trainer.held_out import HeldOut
from megarl.types import Shard, fetch
from tests.support.held_out import DPO, ROWS, SFT, rows
from tests.support.loss_cases import settings
from tests.support.megatron_runs import cases, selected
from tests.support.stack import metrics, run
from tests.support.trainer_processes import run_cases

WORKER = "tests.support.held_out_worker"
SAME = 1e-6
"""Of losses in float32, over other splits."""


# --- by hand ------------------------------------------------------------------------------------


def row(number: int, answer: int) -> Example:
    """A row with two prompt tokens and `answer` loss tokens."""
    mask = np.array([False] * 2 + [True] * answer)
    return Example(f"row/{number}", "test", np.full(len(mask), number, np.int32), mask, "")


class Trainers:
    """Stand-in trainers: each token of row n has loss n, and each of its samples metric n."""

    def __init__(self) -> None:
        self.pieces: list[list[Shard]] = []

    def scatter(self, method: str, per_rank: list[tuple[Shard]]) -> list[None]:
        assert method == "load_shard"
        self.pieces.append([shard for (shard,) in per_rank])
        return [None] * len(per_rank)

    def call(self, method: str) -> list[Any]:
        if (
            method == "describe"
        ):  # trainers 0 and 1 are data-parallel ranks; the third is of rank 1, and does not report
            return [{"dp_rank": rank, "dp_size": 2} for rank in (0, 1, 1)]
        if method == "compute_reference_log_probs":
            return [None] * len(self.pieces[-1])
        return [self._of(shard) for shard in self.pieces[-1][:-1]] + [None]  # the last does not report

    def _of(self, shard: Shard) -> dict[str, float]:
        losses = [
            float(vectors.tokens[0]) * sample.loss_weight * int(vectors.loss_mask.sum())
            for sample, vectors in zip(shard.samples, fetch(shard.samples), strict=True)
        ]
        return {"eval/loss": sum(losses)}


def held_out(examples: Any, source: str = "sft", **recipe_settings: Any) -> tuple[HeldOut, Trainers]:
    recipe, trainers = Recipe(), Trainers()
    recipe.train.source, recipe.algorithm.loss = source, {"sft": "sft", "preferences": "dpo"}[source]
    recipe.algorithm.aggregation = "seq_mean_token_mean"
    recipe.data.prompts_per_step, recipe.evaluation.limit = 2, recipe_settings.get("limit")
    actor = ActorGroup(trainers, recipe)  # type: ignore[arg-type]
    actor.describe()
    return HeldOut(recipe, examples, actor), trainers


def test_a_loss_is_the_mean_over_all_tokens_for_any_number_of_pieces() -> None:
    """1, 2, 4, 3 and 10 tokens with losses 0, 1, 2, 3 and 4 give (0 + 2 + 8 + 9 + 40) / 20, in pieces of 1, 2 and 2 rows. A
    mean over pieces, a mean over rows, or a filler row that counts would give another number."""
    rows = [row(number, answer) for number, answer in enumerate([1, 2, 4, 3, 10])]
    evaluation, trainers = held_out(rows)
    assert evaluation.evaluate().metrics["eval/loss"] == pytest.approx(59 / 20)
    counted = [[sum(s.loss_weight > 0 for s in shard.samples) for shard in piece[:2]] for piece in trainers.pieces]
    assert [sum(piece) for piece in counted] == [1, 2, 2]
    assert all(shard.loss_tokens == [20] for piece in trainers.pieces for shard in piece)


def test_rows_beyond_the_limit_do_not_count_in_the_normalizer() -> None:
    rows = [row(number, answer) for number, answer in enumerate([1, 2, 4, 3, 10])]
    evaluation, _ = held_out(rows, limit=3)
    assert evaluation.evaluate().metrics["eval/loss"] == pytest.approx(10 / 7)
    evaluation, _ = held_out(rows, limit=9)
    assert evaluation.rows == 5


def test_pairs_share_a_micro_batch_and_have_equal_weights() -> None:
    """Five pairs weigh the same whatever the lengths of their answers: the loss is the mean of 0 .. 4."""
    pairs = [(row(number, 1 + 5 * number), row(number, 7)) for number in range(5)]
    evaluation, trainers = held_out(pairs, source="preferences")
    assert evaluation.evaluate().metrics["eval/loss"] == pytest.approx(2)
    for shard in [shard for piece in trainers.pieces for shard in piece]:
        for members in shard.mini_batches[0]:
            assert [shard.samples[member].index for member in members] == [0, 1] * (len(members) // 2)


def test_metrics_of_a_micro_batch_by_hand() -> None:
    """One pair with log-ratios 3 and 1 and beta 1/2 has a margin of 1. The KL to the reference is not in the loss."""
    mask = torch.tensor([0.0, 1, 0, 1])
    inputs = LossInputs(
        log_probs=torch.tensor([9.0, -2, 9, -4]),
        reference_log_probs=torch.full((4,), -5.0),
        loss_mask=mask,
        loss_weights=mask / 2,
        token_share=mask / 2,
        lengths=[2, 2],
    )
    actual = held_out_metrics(inputs, settings(loss="dpo", dpo_beta=0.5, kl_coef=1.0))
    assert {name: value.item() for name, value in actual.items()} == pytest.approx(
        {
            "eval/loss": math.log(1 + math.exp(-1)),
            "eval/dpo_accuracy": 1,
            "eval/dpo_margin": 1,
            "eval/dpo_reward_chosen": 1.5,
            "eval/dpo_reward_rejected": 0.5,
        }
    )
    assert held_out_metrics(inputs, settings(loss="sft"))["eval/loss"].item() == 3


# --- on the real stack --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A directory with the cases' results from tests/support/held_out_worker.py and their rows."""
    directory = tmp_path_factory.mktemp("held_out")
    numbers = [3, 41, 7, 12, 500, 9, 77]
    with (directory / "sft.jsonl").open("w") as sft, (directory / "preferences.jsonl").open("w") as preferences:
        for place, number in enumerate(numbers):
            answer = " ".join(str(number + n) for n in range(place + 1))
            sft.write(json.dumps({"prompt": f"Count from {number}:", "response": answer}) + "\n")
            pair = {"chosen": answer, "rejected": f"{number}" * (ROWS - place)}
            preferences.write(json.dumps({"prompt": f"Count from {number}:", **pair}) + "\n")
    chosen_cases = [
        {
            "processes": 2,
            "model": str(quickstart_data / "model"),
            "rows": str(directory / f"{case['source']}.jsonl"),
            **case,
        }
        for case in selected(request, [*SFT, *DPO])
    ]
    for processes in (1, 2):
        some = [case for case in chosen_cases if case["processes"] == processes]
        if some:
            run_cases(WORKER, processes, some, directory)
    return directory


def of(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / f"{name}.json").read_text())  # type: ignore[no-any-return]


@functools.lru_cache
def answers(model: Path, results: Path, source: str) -> list[list[float]]:
    """Return transformers' log-prob of each token, by answer (pairs: chosen, rejected, chosen, ...)."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    case = {"source": source, "model": str(model), "rows": str(results / f"{source}.jsonl")}
    log_probs_of_answers = []
    for row in rows(case):
        for example in row if isinstance(row, tuple) else (row,):
            tokens = torch.from_numpy(example.tokens).long()
            with torch.no_grad():
                log_probs = loaded(tokens[None]).logits[0].double().log_softmax(-1)[:-1].gather(1, tokens[1:, None])
            log_probs_of_answers.append(log_probs[torch.from_numpy(example.loss_mask[1:]), 0].tolist())
    return log_probs_of_answers


def sft_loss(model: Path, results: Path, limit: int | None = None) -> float:
    tokens = [log_prob for answer in answers(model, results, "sft")[:limit] for log_prob in answer]
    return -sum(tokens) / len(tokens)


def dpo_metrics(model: Path, reference: Path, results: Path) -> dict[str, float]:
    trained, start = ([sum(answer) for answer in answers(path, results, "preferences")] for path in (model, reference))
    chosen, rejected = (0.1 * (np.array(trained) - np.array(start))[first::2] for first in (0, 1))
    ahead = chosen - rejected
    return {
        "eval/loss": float(np.mean(np.log1p(np.exp(-ahead)))),
        "eval/dpo_accuracy": float(np.mean(ahead > 0)),
        "eval/dpo_margin": float(np.mean(ahead)),
        "eval/dpo_reward_chosen": float(np.mean(chosen)),
        "eval/dpo_reward_rejected": float(np.mean(rejected)),
    }


@pytest.mark.stack
@cases(SFT)
def test_sft_loss_equals_transformers(results: Path, quickstart_data: Path, case: dict[str, Any]) -> None:
    measured, limit = of(results, case["name"]), case.get("limit")
    assert set(measured["before"]) == {"eval/loss"}
    start = sft_loss(quickstart_data / "model", results, limit)
    assert measured["before"]["eval/loss"] == pytest.approx(start, rel=1e-5)
    if "reference" in case:
        of_one_process = of(results, case["reference"])["before"]["eval/loss"]
        assert measured["before"]["eval/loss"] == pytest.approx(of_one_process, rel=SAME)
    if "after" in measured:
        after = sft_loss(results / f"{case['name']}.evaluated", results)
        assert measured["after"]["eval/loss"] == pytest.approx(after, rel=1e-5)
        assert after < start - 0.1, "training has changed too little for this to show anything"


@pytest.mark.stack
@cases(DPO)
def test_dpo_metrics_equal_transformers(results: Path, quickstart_data: Path, case: dict[str, Any]) -> None:
    """Before training all margins are 0. Afterwards the reference is the starting model, with adapters too."""
    measured = of(results, case["name"])
    assert measured["before"] == pytest.approx(
        {**dict.fromkeys(measured["before"], 0.0), "eval/loss": math.log(2)}, abs=1e-6
    )
    if "after" in measured:
        expected = dpo_metrics(results / f"{case['name']}.evaluated", quickstart_data / "model", results)
        assert measured["after"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert abs(expected["eval/dpo_margin"]) > 0.01, "training has changed too little for this to show anything"


@pytest.mark.stack
@cases([case for case in [*SFT, *DPO] if case.get("steps")])
def test_evaluations_do_not_change_training(results: Path, case: dict[str, Any]) -> None:
    """Two steps with three evaluations give bit-identical metrics and weights to two steps without."""
    measured = of(results, case["name"])
    assert len(measured["plain"]) == 2 and measured["evaluated"] == measured["plain"]
    evaluated, plain = (
        load_file(results / f"{case['name']}.{kind}" / "model.safetensors") for kind in ("evaluated", "plain")
    )
    assert evaluated.keys() == plain.keys()
    assert all(torch.equal(evaluated[key], tensor) for key, tensor in plain.items())


@pytest.mark.slow
@pytest.mark.stack
def test_a_run_writes_its_evaluation_loss(quickstart_data: Path, tmp_path: Path) -> None:
    """The command line writes the loss to metrics, console, summary and report."""
    data = quickstart_data / "data"
    done = run(
        "train", "recipes/tiny/dpo.yaml", f"model.path={quickstart_data}/model", f"runs_dir={tmp_path}", "name=dpo",
        f"data.train_files=[{data}/preferences.parquet]", f"data.eval_files=[{data}/preferences_test.parquet]",
        "data.prompts_per_step=8", "evaluation.limit=9", "train.steps=2", "train.save_at_end=false",
        "cluster.trainers=1", "megatron.expert_parallel=1", "observe.console=plain", torchrun=1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    first, between, last = metrics(tmp_path / "dpo")
    assert first["step"] == 0 and first["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert not any(name.startswith("eval/") for name in between)
    assert last["eval/loss"] != first["eval/loss"] and "timing_s/eval" in last
    assert "eval/loss 0.693" in done.stdout
    summary = json.loads((tmp_path / "dpo" / "summary.json").read_text())
    assert summary["eval_loss_before"] == first["eval/loss"] and summary["eval_loss_after"] == last["eval/loss"]
    assert "Evaluation loss" in (tmp_path / "dpo" / "report.html").read_text()
