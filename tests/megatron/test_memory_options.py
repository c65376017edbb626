"""Options that trade compute for memory change nothing else: updates are bit-identical.

tests/support/megatron_worker.py checks the same for offloading, after a resume; benchmarks/memory.py measures the memory
that each option saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_models import write_model
from tests.support.trainer_processes import run_cases

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "keep_logits": {"keep_logits": True},
}
MODELS = [("qwen3_moe", "float32"), ("deepseek_v3", "float32"), ("qwen3", "bfloat16")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("memory")
    cases = [
        {"name": f"{model}-{option}", "model": str(directory / model), "dtype": dtype, "megatron": megatron}
        for model, dtype in MODELS
        for option, megatron in OPTIONS.items()
    ]
    for model, _ in MODELS:
        write_model(model, directory)
    run_cases("tests.support.memory_worker", 1, cases, directory)
    return directory


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "plain"])
@pytest.mark.parametrize("model", [model for model, _ in MODELS])
def test_memory_options_keep_updates_bit_identical(results: Path, model: str, option: str) -> None:
    plain, other = (torch.load(results / f"{model}-{name}.pt", weights_only=True) for name in ("plain", option))
    assert other["metrics"] == plain["metrics"]
    for name, weight in plain["weights"].items():
        assert torch.equal(other["weights"][name], weight), name


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("model", [model for model, _ in MODELS])
def test_recompute_saves_activation_memory(results: Path, model: str) -> None:
    """Each recompute option must save memory; an unread option would pass the equality test."""
    saved = {
        option: torch.load(results / f"{model}-{option}.pt", weights_only=True)["saved"]
        for option in ("plain", "selective", "full")
    }
    assert saved["full"] < 0.5 * saved["plain"], saved
    assert saved["selective"] < saved["plain"], saved
