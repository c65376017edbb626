"""Run the cases of layout tests in trainer processes, read their results, and compute transformers' results."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megarl.hf.families import has_tower
from tests.support.megatron_models import (
    CLIP_GRAD,
    ENTROPY_COEF,
    LOSS_SCALE,
    TEMPERATURE,
    global_batch,
    reference_model,
    rows_of_logits,
    stack_experts,
)
from tests.support.trainer_processes import run_cases
from tests.support.vl_model import published_experts

WORKER = "tests.support.megatron_worker"
SAME_GRADIENT = 1e-5
"""Tolerance relative to a tensor's largest element; gaps up to 2e-6 occur."""
SAME_CHANGE_OF_DELTA_NETS = 1e-4
DECAY, SAME_DECAY = ("A_log", "dt_bias", "in_proj_a.weight"), 1e-3
"""Parameters of a delta net's decay. In float32, the chunked rules of Megatron and of transformers are both some 1e-4 away from the
gradient of the recurrence itself in float64, since they subtract cumulative sums."""
SAME_CHANGE = 1e-5
LAST_BITS = 2 * torch.finfo(torch.float32).eps  # two steps, each of which rounds
CARRIED = ("model.visual.", "vision_tower.", "multi_modal_projector.")  # towers that are not trained
_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
UNTRAINED = ("e_score_correction_bias", "score.bias", *(f"indexer.{name}" for name in _INDEXER))
"""Weights without gradient: experts' routing biases, untrained weights of a critic's export, indexers of sparse attention."""


def cases(*lists: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """Run a test for each case; slow cases only with --all."""
    marked = [
        pytest.param(case, id=case["name"], marks=[pytest.mark.slow] if case.get("slow") else [])
        for some in lists
        for case in some
    ]
    return pytest.mark.parametrize("case", marked)


def selected(request: pytest.FixtureRequest, some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases of the selected tests and their references: `-k moonlight-TP2` runs two cases."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    requested = [value for item in items for value in item.callspec.params.values() if isinstance(value, dict)]
    names = {case[key] for case in requested for key in ("name", "reference") if case.get(key)}
    return [case for case in some if case["name"] in names]


def only_layouts(request: pytest.FixtureRequest, layouts: list[dict[str, Any]]) -> bool:
    """True if every selected test of the file that needs the launches is a test of one of `layouts`."""
    names = {case["name"] for case in layouts}
    items = [item for item in request.session.items if item.path == request.path and "results" in item.fixturenames]
    return all(hasattr(item, "callspec") and item.callspec.params["case"]["name"] in names for item in items)


def launch(
    processes: int, cases: list[dict[str, Any]], directory: Path, worker: str = WORKER, timeout: float = 900
) -> None:
    """Run `cases`, one after the other, in `processes` processes of the module `worker`."""
    resolved = [{**case, "model": str(directory / "models" / case["model"])} for case in cases]
    run_cases(worker, processes, resolved, directory, timeout)


def log_probs_of(results: Path, name: str) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(log-probs, entropy, sums of squared probabilities) of each sequence, from all data-parallel ranks."""
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
def of_transformers(model: Path) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Log-probs, entropies and sums of squared probabilities of a model directory with transformers; see `rows_of`."""
    return rows_of(reference_model(model))


@torch.no_grad()
def rows_of(model: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(log-probs, entropy, sums of squared probabilities) [length] each, of each of the workers' sequences, computed alone by a transformers model."""
    return [rows_of_logits(model(tokens[None]).logits[0], tokens) for tokens in global_batch()[0]]


def check_weights(
    got: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
    same_change: float = SAME_CHANGE,
) -> None:
    """Assert that training has changed every weight, and to the expected value: within a share of the change
    (`same_change`) plus the weight's last bits. `before` may lack the second name of a tensor that is exported twice."""
    assert got.keys() == expected.keys()
    for name in expected.keys() & before.keys():
        moved = (expected[name] - before[name]).abs().max()
        assert (moved > 0) != name.endswith(UNTRAINED), f"{name} has moved by {moved:.1e}"
        gap = (got[name] - expected[name]).abs().max()
        limit = same_change * moved + LAST_BITS * before[name].abs().max()
        assert gap <= limit, f"{name}: {gap:.1e} apart, and it has moved by {moved:.1e}"


def check_gradient(results: Path, name: str, model: Any, inputs: list[dict[str, torch.Tensor]]) -> None:
    """Assert that the gradient of the case `name` equals transformers' autograd, tensor by tensor.

    `model`: a transformers model with the case's weights; `inputs`: its arguments for each sequence.
    """
    trained = torch.load(results / f"{name}.pt", weights_only=True)
    for sample, advantages in zip(inputs, global_batch()[1], strict=True):
        log_probs, entropy, _ = rows_of_logits(model(**sample).logits[0] / TEMPERATURE, sample["input_ids"][0])
        ((-log_probs * advantages - ENTROPY_COEF * entropy).sum() * LOSS_SCALE).backward()
    expected = gradient_of_transformers(model, results / f"{name}.gradient")
    assert expected.keys() == {key for key in trained["gradient"] if not key.endswith(UNTRAINED)}
    norm = torch.stack([tensor.double().square().sum() for tensor in expected.values()]).sum().sqrt().item()
    assert trained["metrics"][0]["actor/grad_norm"] == pytest.approx(norm, rel=SAME_GRADIENT)
    clipped = min(1.0, CLIP_GRAD / (norm + 1e-6))
    for tensor_name, tensor in expected.items():
        clipped_gradient = tensor.double() * clipped
        gap = (trained["gradient"][tensor_name] - clipped_gradient).abs().max() / clipped_gradient.abs().max()
        assert gap < (SAME_DECAY if tensor_name.endswith(DECAY) else SAME_GRADIENT), f"{tensor_name}: {gap:.1e}"


def gradient_of_transformers(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """The gradients of a transformers model by checkpoint name; a checkpoint has each expert separately."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(directory)
    tensors = checkpoint_tensors(directory)
    if model.config.model_type in ("qwen3_5_moe", "qwen3_5_moe_text"):
        tensors = stack_experts(tensors)
    if model.config.model_type == "qwen3_vl_moe":
        tensors = published_experts(tensors)
    trained = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNTRAINED)}
    if has_tower(model.config.to_dict()):
        return trained
    return {name: tensor for name, tensor in trained.items() if not name.startswith(CARRIED)}
