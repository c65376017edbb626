"""Runs the cases of layout tests in trainer processes, reads what these wrote, and computes what transformers does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.megatron_models import LENGTHS, rows_of_logits
from tests.trainer_processes import run_cases

WORKER = "tests.megatron_worker"


def cases(*lists: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """Run a test for each case; the slow ones with --all alone."""
    marked = [
        pytest.param(one, id=one["name"], marks=[pytest.mark.slow] if one.get("slow") else [])
        for some in lists
        for one in some
    ]
    return pytest.mark.parametrize("case", marked)


def selected(request: pytest.FixtureRequest, some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `some` that the selected tests are about, and those that they are compared with: `-k moonlight-TP2`
    runs two."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [value for item in items for value in item.callspec.params.values() if isinstance(value, dict)]
    names = {one[key] for one in asked for key in ("name", "reference") if one.get(key)}
    return [one for one in some if one["name"] in names]


def launch(processes: int, cases: list[dict[str, Any]], directory: Path, timeout: float = 900) -> None:
    """Run `cases`, one after the other, in `processes` worker processes."""
    resolved = [{**case, "model": str(directory / "models" / case["model"])} for case in cases]
    run_cases(WORKER, processes, resolved, directory, timeout)


def log_probs_of(results: Path, name: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(log-probs, entropy) of each sequence, from all data-parallel ranks."""
    merged: dict[int, Any] = {}
    for file in results.glob(f"{name}.log_probs.*.pt"):
        merged.update(torch.load(file, weights_only=True))
    return merged


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            tensors.update({key: reader.get_tensor(key) for key in reader.keys()})  # noqa: SIM118
    return tensors


@functools.lru_cache
def of_transformers(model: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What transformers computes of the model in a directory; see `rows_of`."""
    return rows_of(
        transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    )


@torch.no_grad()
def rows_of(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(log-probs, entropy) [length] each, of each of the workers' sequences, computed alone by a transformers model."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]
    return [rows_of_logits(model(tokens[None]).logits[0], tokens) for tokens in sequences]
