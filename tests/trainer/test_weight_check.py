"""Broken weights end the run before they reach engines, a checkpoint or an export."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.megatron.weight_check import LARGEST_WEIGHT, BrokenWeights, check_weights
from megarl.trainer.actor import ActorWorker


def model(value: float = 0.5, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Two parameters and an empty one; `value` is the last element of the second."""
    chunk = torch.nn.Module()
    chunk.first = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    chunk.second = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.0, value]], dtype=dtype), requires_grad=False)
    chunk.empty = torch.nn.Parameter(torch.ones(0, dtype=dtype))
    return chunk


@pytest.mark.parametrize("value", [0.0, -400.0, LARGEST_WEIGHT / 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_real_models_pass(value: float, dtype: torch.dtype) -> None:
    check_weights([model(value, dtype)], "unused")


@pytest.mark.parametrize(
    ("value", "shown"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "inf"), (-1e16, r"1e\+16"), (2e6, r"2e\+06")]
)
def test_a_broken_weight_is_named(value: float, shown: str) -> None:
    with pytest.raises(BrokenWeights, match=rf"1 of 4 parameters .*second; .*value is {shown}.*: it ends here"):
        check_weights([model(), model(value, torch.float32)], "it ends here")


class Trainer:
    """A trainer with broken weights that records its calls."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(chunks=[model(math.nan)])
        self.calls: list[str] = []

    def finish_param_gather(self) -> None:
        self.calls.append("finish_param_gather")

    def load(self, folder: Path) -> None:
        self.calls.append("load")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("stage_save", ("checkpoint", False), "they are not saved. Resume from an earlier checkpoint"),
        ("save_hf", ("model",), "nothing is exported to model. Resume from an earlier checkpoint"),
        ("send_weights", (7,), "the engines do not receive version 7. Resume from an earlier checkpoint"),
        ("load", ("runs/x/step_000003",), "resume from a checkpoint before runs/x/step_000003"),
    ],
)
def test_a_worker_passes_no_broken_weights_on(method: str, arguments: tuple[Any, ...], words: str) -> None:
    worker: Any = object.__new__(ActorWorker)
    worker.trainer, sent = Trainer(), []
    worker.sender = SimpleNamespace(send=lambda *_: sent.append(1))
    with pytest.raises(BrokenWeights, match=words):
        getattr(worker, method)(*arguments)
    assert worker.trainer.calls in (["finish_param_gather"], ["load", "finish_param_gather"]) and not sent
