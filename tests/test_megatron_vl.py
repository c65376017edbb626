"""Qwen2.5-VL: every layout computes what transformers computes, with packed images and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_models import LENGTHS
from tests.test_megatron_layouts import checkpoint_tensors, launch, layout, log_probs_of
from tests.vl_model import expected_logits, sequences, write_vl_model

pytestmark = pytest.mark.stack

MODELS: dict[str, dict[str, Any]] = {"vl": {}, "vl_tied": {"tie_word_embeddings": True}}
UPSTREAM = {"name": "upstream", "kind": "upstream", "model": "vl"}
ONE = [layout("vl", per_micro=3), layout("vl_tied", per_micro=2)]
TWO = [
    layout("vl", tensor_parallel=2),
    layout("vl", per_micro=2, pipeline_parallel=2, first_stage_layers=1),
    layout("vl", context_parallel=2),
    layout("vl", per_micro=1, data_parallel_size_is=2),
    layout("vl_tied", pipeline_parallel=2),
]
SLOW_TWO = [
    layout("vl", tensor_parallel=2, sequence_parallel=False),
    layout("vl", tensor_parallel=2, recompute="full"),
    layout("vl", per_micro=8, pipeline_parallel=2, recompute="selective"),
]
SLOW_FOUR = [
    layout("vl", per_micro=2, tensor_parallel=2, pipeline_parallel=2),
    layout("vl", tensor_parallel=2, context_parallel=2),
]
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


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_match_transformers(results: Path, model: str) -> None:
    rows = log_probs_of(results, model)
    assert sorted(rows) == list(range(len(LENGTHS)))
    for number, ((tokens, _), logits) in enumerate(
        zip(sequences(), expected_logits(results / "models" / model), strict=True)
    ):
        expected = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        torch.testing.assert_close(rows[number][0][1:], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", [*ONE, *TWO], ids=lambda case: case["name"])
def test_layout_changes_nothing(results: Path, case: dict[str, Any]) -> None:
    check(results, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_TWO, *SLOW_FOUR], ids=lambda case: case["name"])
def test_more_layouts_change_nothing(slow_results: Path, case: dict[str, Any]) -> None:
    """A resumed run's equality is asserted in the worker of the same launch."""
    check(slow_results, case)


def check(results: Path, case: dict[str, Any]) -> None:
    one, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (case["model"], case["name"]))

    original = checkpoint_tensors(results / "models" / case["model"])
    assert original.keys() <= got["before"].keys()
    assert all(torch.equal(got["before"][name], weight) for name, weight in original.items()), "round trip is not exact"

    for number, values in log_probs_of(results, case["name"]).items():
        for value, expected in zip(values, log_probs_of(results, case["model"])[number], strict=True):
            torch.testing.assert_close(value, expected, atol=5e-6, rtol=0)

    for metrics, expected in zip(got["metrics"], one["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=2e-6), "a loss or gradient norm depends on the layout"
    for name, weight in one["after"].items():
        torch.testing.assert_close(got["after"][name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert not torch.equal(weight, one["before"][name]), f"{name} was not trained"
