"""A refreshed reference policy: log-probs and checkpoints, in layouts of two processes, with adapters, and moved to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_models import LENGTHS, write_model
from tests.support.megatron_runs import launch, log_probs_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def case(name: str, model: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "reference", "model": model, **more}


TWO = [
    case("dp", "qwen2_tied"),
    case("dp-bf16", "qwen2_tied", dtype="bfloat16"),
    case("tp-ep", "qwen3_moe", megatron={"tensor_parallel": 2, "expert_parallel": 2}, **{"from": "moe"}),
    case("lora", "qwen2_tied", lora={"rank": 4, "targets": ["all-linear"]}),
]
ONE = [
    case("moe", "qwen3_moe", megatron={"distributed_optimizer": False}),
    case("one", "qwen2_tied", **{"from": "dp"}),
]
"""`from`: loads the checkpoint of that case, in another layout."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    for model in ("qwen2_tied", "qwen3_moe"):
        write_model(model, directory / "models")
    launch(1, ONE[:1], directory)
    launch(2, TWO, directory)
    launch(1, ONE[1:], directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("moe", "tp-ep"), ("dp", "one")], ids=lambda pair: pair[1])
def test_another_layout_has_the_same_reference(results: Path, pair: tuple[str, str]) -> None:
    """The worker asserts that a checkpoint holds the reference policy, and that a resumed trainer has it bit for bit."""
    saved, moved = (log_probs_of(results, name) for name in pair)
    assert sorted(saved) == sorted(moved) == list(range(len(LENGTHS)))
    for number, rows in saved.items():
        torch.testing.assert_close(moved[number], rows, atol=2e-5, rtol=0)
