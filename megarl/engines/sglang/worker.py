"""Receive and load weights in each of SGLang's scheduler processes.

SGLang calls `receive` as a custom weight loader with its model and a dummy tensor with the task, as JSON, in its name.
The loader cannot return a value, and an exception would end the process, so the result goes into a file. (SGLang 0.5.23:
model_executor/model_runner_components/weight_updater.py.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megarl.weight_sync.full.receiver import FullReceiver
from megarl.weight_sync.session import Session

_SHOWN = 5  # names in an error
_receivers: dict[str, FullReceiver] = {}  # by session; at most one per process


def update_task(session: str, engine: str, version: int, folder: str) -> str:
    """Serialize the task to receive `version` of `session` (JSON) and to write the result into `folder`."""
    return json.dumps({"session": session, "engine": engine, "version": version, "folder": folder})


def receive(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    ((text, _),) = named_tensors
    task = json.loads(text)
    rank = _rank()
    try:
        result: dict[str, Any] = {"report": _update(model, task, rank)}
    except Exception as error:  # noqa: BLE001 -- the engine raises it
        result = {"error": f"{type(error).__name__}: {error}"}
    file = Path(task["folder"], f"{rank}.json")
    file.with_suffix(".partial").write_text(json.dumps(result))
    os.replace(file.with_suffix(".partial"), file)


def read_results(folder: str, ranks: int) -> list[dict[str, Any]]:
    """Read the results that `receive` wrote on each rank, in rank order."""
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def _update(model: torch.nn.Module, task: dict[str, Any], rank: int) -> dict[str, Any]:
    receiver = _receivers.get(task["session"])
    if receiver is None:
        while _receivers:
            _receivers.popitem()[1].close()
        receiver = FullReceiver(Session.from_json(task["session"]), f"{task['engine']}/{rank}")
        _receivers[task["session"]] = receiver
    try:
        load(model, receiver.weights(task["version"]))
        return receiver.finish().to_dict()
    except Exception as error:
        receiver.fail(f"{type(error).__name__}: {error}")
        raise


def load(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load checkpoint-format `weights` into a live SGLang model. ValueError if a parameter is not completely loaded.

    All weights are loaded in a single call, since some models compute derived values at its end. Parameters are filled
    with NaN first, so that any missing value is detected: SGLang loads in threads and skips unknown names with a warning.
    """
    parameters = [(name, value) for name, value in model.named_parameters() if value.is_floating_point()]
    with torch.no_grad():
        for _, value in parameters:
            value.fill_(torch.nan)
        model.load_weights(weights)
        lacking = [name for name, value in parameters if bool(torch.isnan(value).any())]
    if lacking:
        raise ValueError(
            f"{len(lacking)} parameters of the engine's model lack values: {', '.join(lacking[:_SHOWN])}; the trainer's "
            "weights are incomplete or contain NaN"
        )
