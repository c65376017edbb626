"""Qwen2.5-VL: every layout computes what transformers computes, with packed images and text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_layouts import case
from tests.megatron_models import LENGTHS
from tests.test_megatron_layouts import checkpoint_tensors, launch, log_probs_of
from tests.vl_model import expected_logits, sequences, write_vl_model

pytestmark = pytest.mark.stack

MODELS: dict[str, dict[str, Any]] = {"vl": {}, "vl_tied": {"tie_word_embeddings": True}}
UPSTREAM = {"name": "upstream", "kind": "upstream", "model": "vl"}
ONE = [case("vl", "TP1", per_micro=3), case("vl_tied", "TP1")]
TWO = [
    case("vl", "TP2"),
    case("vl", "PP2", per_micro=2, first_stage_layers=1),
    case("vl", "CP2"),
    case("vl", "DP2", per_micro=1),
    case("vl_tied", "PP2"),
]
SLOW_TWO = [
    case("vl", "TP2", sequence_parallel=False),
    case("vl", "TP2", recompute="full"),
    case("vl", "PP2", per_micro=8, recompute="selective"),
]
SLOW_FOUR = [case("vl", "TP2xPP2"), case("vl", "TP2xCP2")]
RESUME = {"name": "resume", "kind": "resume", "model": "vl", "megatron": {"tensor_parallel": 2}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of models/ and of what the workers of all cases wrote."""
    directory = tmp_path_factory.mktemp("megatron")
    for model, fields in MODELS.items():
        write_vl_model(directory / "models" / model, **fields)
    for processes, cases in ((1, [UPSTREAM, *ONE]), (2, TWO)):
        launch(processes, cases, directory)
    return directory


@pytest.fixture(scope="module")
def slow_results(results: Path) -> Path:
    for processes, cases in ((2, [*SLOW_TWO, RESUME]), (4, SLOW_FOUR)):
        launch(processes, cases, results)
    return results


@pytest.mark.parametrize("case", [*ONE, *TWO], ids=lambda case: case["name"])
def test_layout_changes_nothing(results: Path, case: dict[str, Any]) -> None:
    check(results, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_TWO, *SLOW_FOUR], ids=lambda case: case["name"])
def test_more_layouts_change_nothing(slow_results: Path, case: dict[str, Any]) -> None:
    """A resumed run's equality is asserted in the worker of the same launch."""
    check(slow_results, case)


def check(results: Path, case: dict[str, Any]) -> None:
    rows = log_probs_of(results, case["name"])
    assert sorted(rows) == list(range(len(LENGTHS)))
    for number, ((tokens, _), logits) in enumerate(zip(sequences(), logits_of(results, case["model"]), strict=True)):
        expected = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        torch.testing.assert_close(rows[number][0][1:], expected, atol=2e-5, rtol=0)

    original = checkpoint_tensors(results / "models" / case["model"])
    exported = checkpoint_tensors(results / f"{case['name']}.hf")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in original.items()), "round trip is not exact"

    one, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (case["reference"], case["name"]))
    for metrics, expected in zip(got["metrics"], one["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=2e-6), "a loss or gradient norm depends on the layout"
    for name, weight in one["after"].items():
        torch.testing.assert_close(got["after"][name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert name not in original or not torch.equal(weight, original[name]), f"{name} was not trained"


@functools.cache
def logits_of(results: Path, model: str) -> list[torch.Tensor]:
    return expected_logits(results / "models" / model)
