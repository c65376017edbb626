"""Activation memory on the meta device equals a trainer's allocations, with recomputation and with parallel ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.commands.plan.count.rank_client import RankRequest
from megarl.commands.plan.count.workload import Workload
from tests.support.activations_cases import CASES, MODELS, config_of, recipe_of
from tests.support.count_ranks import count_ranks
from tests.support.trainer_processes import run_ranks

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, int], dict[str, Any]]]:
    """The peaks of torch's allocator and the planner's counts, by case."""
    directory = tmp_path_factory.mktemp("activations")
    for model in MODELS:
        (directory / model).mkdir()
        (directory / model / "config.json").write_text(json.dumps(config_of(model)))
    cases = [{**case, "directory": str(directory)} for case in CASES]
    file = directory / "cases.json"
    file.write_text(json.dumps(cases))
    run_ranks("tests.support.activations_worker", 1, [file, directory], directory / "log", 900)
    answers = count_ranks([RankRequest(recipe_of(case), case["rank"], work=Workload(**case["work"])) for case in cases])
    return {
        case["name"]: (json.loads((directory / f"{case['name']}.json").read_text()), answer)
        for case, answer in zip(cases, answers, strict=True)
    }


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_counted_peaks_equal_the_allocators(counted: dict[str, Any], name: str) -> None:
    """The bound is 3 %, because kernels allocate some memory."""
    real, answer = counted[name]
    planned = answer["activations"]
    assert {phase: planned[phase] for phase in real} == pytest.approx(real, rel=0.03)


def test_recompute_reduces_kept_activations(counted: dict[str, Any]) -> None:
    none, full = (
        counted[f"Qwen3-30B-A3B-recompute={how}-rank=0"][1]["activations"]["kept"] for how in ("none", "full")
    )
    assert full < 0.2 * none
