"""Passes over a caller's data and updates with a caller's settings equal plain torch, in any layout."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megarl.batching.datums import AdamParams, Datum, lay_out
from tests.support.datum_cases import ADAM, AGAIN, CASES, PASSES, data_of
from tests.support.megatron_runs import cases, selected
from tests.support.trainer_processes import run_cases

WORKER = "tests.support.datum_worker"
SAME = 1e-5


def test_every_datum_is_in_one_micro_batch() -> None:
    data = [Datum(np.ones(n), np.ones(n)) for n in (3, 30, 8, 8, 2)]
    shards = lay_out(data, 2, max_tokens=20, micro_batches_multiple_of=2)
    counts = {len(shard.micro_batches) for shard in shards}
    assert len(counts) == 1 and counts.pop() % 2 == 0
    placed = [
        (shard.numbers[slot.sample], len(shard.data[slot.sample].tokens))
        for shard in shards
        for part in shard.micro_batches
        for slot in part
        if not slot.filler
    ]
    assert sorted(placed) == [(number, len(datum.tokens)) for number, datum in enumerate(data)]


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "eps", "weight_decay", "grad_clip_norm"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1"])
def test_impossible_settings_of_adam_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is"):
        AdamParams(**{field: value})  # type: ignore[arg-type]


def test_betas_are_below_1() -> None:
    with pytest.raises(ValueError, match="beta2 is 1; it must be below 1"):
        AdamParams(beta2=1)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("datums")
    for processes in (1, 2):
        some = [case for case in selected(request, CASES) if case.get("processes", 2) == processes]
        if some:
            run_cases(
                WORKER, processes, [{**case, "model": str(quickstart_data / "model")} for case in some], directory
            )
    return directory


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def log_probs_of(model: Any, datum: Datum) -> torch.Tensor:
    logits = model(torch.from_numpy(datum.tokens)[None]).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]


def loss_of(name: str, options: dict[str, float], log_probs: torch.Tensor, datum: Datum) -> torch.Tensor:
    """The formulas of the API's documentation, one datum at a time."""
    vectors = {key: torch.from_numpy(np.asarray(vector, np.float32)) for key, vector in datum.vectors.items()}
    if name == "cross_entropy":
        return -(log_probs * vectors["weights"]).sum()
    advantages, difference = vectors["advantages"], log_probs - vectors["logprobs"]
    if name == "importance_sampling":
        return -(difference.exp() * advantages).sum()
    if name == "dro":
        return -(log_probs * advantages - 0.5 * options["beta"] * difference**2).sum()
    low, high = options["clip_low_threshold"], options["clip_high_threshold"]
    if name == "cispo":
        return -(difference.exp().clamp(low, high).detach() * log_probs * advantages).sum()
    ratio = difference.exp()
    if name == "gspo":
        of_sequence = difference.detach()[vectors["sequence_ratio_mask"] != 0].mean()
        ratio = (of_sequence + log_probs - log_probs.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


@functools.lru_cache
def expected(path: Path) -> dict[str, Any]:
    """The results of transformers and torch.optim.AdamW."""
    model, passes, total = load(path), [], torch.zeros(())
    for seed, (name, options) in enumerate(PASSES):
        data = data_of(name, seed)
        log_probs = [log_probs_of(model, datum) for datum in data]
        loss = sum(loss_of(name, options, vector, datum) for vector, datum in zip(log_probs, data, strict=True))
        total = total + loss
        passes.append({"loss": loss.item(), "log_probs": [vector.tolist() for vector in log_probs]})
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1]
    undecayed = [p for name, p in model.named_parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": undecayed, "weight_decay": 0.0}]
    betas = (ADAM.beta1, ADAM.beta2)
    adam = torch.optim.AdamW(groups, lr=ADAM.learning_rate, betas=betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay)
    total.backward()
    norms = [float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.grad_clip_norm))]
    adam.step()
    probe = data_of("cross_entropy", 9)
    after = [[log_probs_of(model, datum).tolist() for datum in probe]]
    adam.zero_grad()
    data = data_of("cross_entropy", 0)
    sum(loss_of("cross_entropy", {}, log_probs_of(model, datum), datum) for datum in data).backward()
    norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
    for group in adam.param_groups:
        group.update(lr=AGAIN.learning_rate, betas=(AGAIN.beta1, AGAIN.beta2), eps=AGAIN.eps, weight_decay=0.0)
    adam.step()
    after.append([log_probs_of(model, datum).tolist() for datum in probe])
    return {"passes": passes, "norms": norms, "after": after}


def close(measured: list[list[float]], reference: list[list[float]], tolerance: float) -> None:
    for ours, other in zip(measured, reference, strict=True):
        assert ours == pytest.approx(other, rel=tolerance, abs=tolerance)


@pytest.mark.stack
@cases(CASES)
def test_losses_and_log_probs_equal_torch(results: Path, quickstart_data: Path, case: dict[str, Any]) -> None:
    measured = json.loads((results / f"{case['name']}.json").read_text())
    reference = expected(quickstart_data / "model")
    for name, ours, other in zip(PASSES, measured["passes"], reference["passes"], strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], rel=SAME), name
        close(ours["log_probs"], other["log_probs"], SAME)
    assert measured["scores"] == measured["passes"][-1], "a pass without gradients gives other numbers"


@pytest.mark.stack
@cases([case for case in CASES if not case.get("lora")])
def test_accumulated_gradients_and_updates_equal_torch(
    results: Path, quickstart_data: Path, case: dict[str, Any]
) -> None:
    """Six passes, an update, a forgotten pass, a pass and an update with other settings."""
    measured = json.loads((results / f"{case['name']}.json").read_text())
    reference = expected(quickstart_data / "model")
    norms, changed = zip(*measured["norms"], strict=True)
    assert all(changed)
    assert norms == pytest.approx(reference["norms"], rel=SAME)
    probe = data_of("cross_entropy", 9)
    for number, after in enumerate(reference["after"], start=1):
        model = load(results / f"{case['name']}.hf{number}")
        with torch.no_grad():
            close([log_probs_of(model, datum).tolist() for datum in probe], after, 1e-4)
