"""`train.on_spike: skip` in real trainer processes: a spike changes neither weights nor optimizer, on any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.megatron_models import write_model
from tests.support.trainer_processes import run_cases

CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("one process", 1, "float32", {}),
    ("two stages", 2, "bfloat16", {"pipeline_parallel": 2}),
    ("two shards of the optimizer", 2, "bfloat16", {}),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each rank, by case."""
    folder = tmp_path_factory.mktemp("spikes")
    model = str(write_model("qwen3", folder))
    for processes in (1, 2):
        cases = [
            {"name": name, "model": model, "dtype": dtype, "megatron": megatron}
            for name, count, dtype, megatron in CASES
            if count == processes
        ]
        run_cases("tests.support.spikes_worker", processes, cases, folder)
    return {name: [torch.load(folder / f"{name}.{rank}") for rank in range(count)] for name, count, *_ in CASES}


EACH = pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) for name, *_ in CASES])


def of(results: dict[str, list[Any]], case: str, part: str, key: str) -> list[Any]:
    """Return a result that must be equal on all ranks."""
    first, *further_ranks = [rank[part][key] for rank in results[case]]
    assert all(other == first for other in further_ranks), (case, part, key, first, further_ranks)
    return first


@EACH
def test_a_spike_leaves_weights_and_optimizer_unchanged(results: dict[str, list[Any]], case: str) -> None:
    assert of(results, case, "plain", "changed") == [True, True]
    assert of(results, case, "both", "skipped") == [1.0, 1.0] and of(results, case, "both", "changed") == [False, False]
    norms = of(results, case, "both", "norms")
    assert min(norms) > 100 * max(of(results, case, "plain", "norms")), "the norm of a spike is reported"
    assert of(results, case, "none", "skipped") == [0.0, 0.0] and of(results, case, "none", "changed") == [True, True]


@EACH
def test_a_later_update_is_compared_with_the_earlier_ones_of_the_step(results: dict[str, list[Any]], case: str) -> None:
    """The first update adds the norm that was missing."""
    assert of(results, case, "the second", "skipped") == [0.0, 1.0]
    assert of(results, case, "the second", "changed") == [True, False]
    assert of(results, case, "too few", "skipped") == [0.0, 0.0], "a spike among too few norms"


@EACH
def test_a_skipped_update_counts_in_the_schedule(results: dict[str, list[Any]], case: str) -> None:
    """Like an update with a norm that is not finite: later updates have the learning rates of a run without the spike."""
    steps = [of(results, case, part, "steps") for part in ("plain", "the second", "both", "none")]
    assert steps == [2, 4, 6, 8]


@EACH
def test_ranks_decide_together(results: dict[str, list[Any]], case: str) -> None:
    """Only rank 1's limit is below the norm. Alone, rank 0 has none below."""
    alone = len(results[case]) == 1
    assert of(results, case, "disagreement", "changed") == [alone, alone]


@EACH
def test_without_norms_a_spike_is_applied(results: dict[str, list[Any]], case: str) -> None:
    """`train.on_spike: warn` and null send none."""
    assert of(results, case, "applied", "skipped") == [0.0, 0.0]
    assert of(results, case, "applied", "changed") == [True, True]
