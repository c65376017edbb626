"""Models that read images and videos: every layout gives the results of transformers, with packed images, videos and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_layouts import FROZEN_TOWER, VL
from tests.support.megatron_models import LENGTHS
from tests.support.megatron_runs import check_gradient, check_weights, checkpoint_tensors, launch, log_probs_of
from tests.support.vl_model import (
    VL_MODELS,
    has_timestamps,
    transformers_inputs,
    transformers_model,
    vl_of_transformers,
    write_vl_model,
)

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(3600)]

UPSTREAM = {"name": "upstream", "kind": "upstream", "model": "vl"}
_RESUME = {"kind": "resume", "model": "vl", "processes": 2, "megatron": {"tensor_parallel": 2}}
RESUME = [{**_RESUME, "name": "resume"}, {**_RESUME, "name": "resume-frozen", "frozen_tower": True}]
CASES = [*VL, *FROZEN_TOWER, *RESUME]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with models/ and the results of all cases' workers. The workers assert that a resumed run is bit-identical."""
    directory = tmp_path_factory.mktemp("megatron")
    for model in VL_MODELS:
        write_vl_model(directory / "models" / model, model)
    launch(1, [UPSTREAM], directory, "tests.support.untouched_ranks")
    for processes in (1, 2, 4):
        launch(processes, [case for case in CASES if case["processes"] == processes], directory, timeout=1000)
    return directory


@pytest.mark.parametrize("case", VL, ids=lambda case: case["name"])
def test_training_does_not_depend_on_the_layout(results: Path, case: dict[str, Any]) -> None:
    rows = log_probs_of(results, case["name"])
    assert sorted(rows) == list(range(len(LENGTHS)))
    for number, expected in enumerate(vl_of_transformers(results / "models" / case["model"])):
        for value, reference in zip(rows[number], expected, strict=True):
            torch.testing.assert_close(value, reference, atol=2e-5, rtol=0)

    original = checkpoint_tensors(results / "models" / case["model"])
    exported = checkpoint_tensors(results / f"{case['name']}.hf")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in original.items()), "round trip is not exact"

    base, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (case["reference"], case["name"]))
    for metrics, expected in zip(got["metrics"], base["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=2e-6), "a loss or gradient norm depends on the layout"
    check_weights(got["after"], base["after"], original)


@pytest.mark.parametrize("case", FROZEN_TOWER, ids=lambda case: case["name"])
def test_a_frozen_tower_keeps_its_weights(results: Path, case: dict[str, Any]) -> None:
    """And the language model is trained the same in every layout; the gradient norm does not include the tower's."""
    original = checkpoint_tensors(results / "models" / case["model"])
    names = ("name", "reference")
    got, base = (torch.load(results / f"{case[name]}.pt", weights_only=True) for name in names)
    tower = {name for name in original if "visual." in name}
    assert len(tower) > 20 and all(torch.equal(got["after"][name], original[name]) for name in tower)
    trained, expected = (
        {name: each["after"][name] for name in each["after"] if name not in tower} for each in (got, base)
    )
    check_weights(trained, expected, original)
    for metrics, of_reference in zip(got["metrics"], base["metrics"], strict=True):
        assert metrics == pytest.approx(of_reference, rel=2e-6)
    whole = torch.load(results / f"{case['model']}-TP1.pt", weights_only=True)
    assert got["metrics"][0]["actor/grad_norm"] < whole["metrics"][0]["actor/grad_norm"]


@pytest.mark.parametrize("model", [case["model"] for case in VL if case["processes"] == 1])
def test_gradient_equals_transformers(results: Path, model: str) -> None:
    """Includes the gradient of the vision tower."""
    inputs = transformers_inputs(timestamps=has_timestamps(model))
    check_gradient(results, f"{model}-TP1", transformers_model(results / "models" / model), inputs)
