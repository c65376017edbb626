"""Inside each of SGLang's scheduler processes: takes weights from the exchange and loads them.

SGLang calls `receive` as a custom weight loader: with its model, and with tensors, of which there is one, without meaning;
its name is what is to be done. Nothing goes back that way, and an exception would end the process, so what came of it is
written into a file. (SGLang 0.5.23: model_executor/model_runner_components/weight_updater.py.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megarl.weight_sync.full.receiver import FullReceiver
from megarl.weight_sync.session import FullSession

_SHOWN = 5  # names in an error
_receivers: dict[str, FullReceiver] = {}  # by their session: of one process, at most one


def order(session: str, engine: str, version: int, folder: str) -> str:
    """What is to be done, as text: receive `version` of `session` (JSON), and answer into `folder`."""
    return json.dumps({"session": session, "engine": engine, "version": version, "folder": folder})


def receive(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    ((text, _),) = named_tensors
    task = json.loads(text)
    rank = _rank()
    try:
        answer: dict[str, Any] = {"report": _update(model, task, rank)}
    except Exception as error:  # noqa: BLE001 -- whoever asked is told
        answer = {"error": f"{type(error).__name__}: {error}"}
    file = Path(task["folder"], f"{rank}.json")
    file.with_suffix(".partial").write_text(json.dumps(answer))
    os.replace(file.with_suffix(".partial"), file)


def answers(folder: str, ranks: int) -> list[dict[str, Any]]:
    """What the ranks' `receive` wrote, in their order."""
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def _update(model: torch.nn.Module, task: dict[str, Any], rank: int) -> dict[str, Any]:
    receiver = _receivers.get(task["session"])
    if receiver is None:
        while _receivers:
            _receivers.popitem()[1].close()
        receiver = FullReceiver(FullSession.from_json(task["session"]), f"{task['engine']}/{rank}")
        _receivers[task["session"]] = receiver
    try:
        load(model, receiver.weights(task["version"]))
        return receiver.finish().to_dict()
    except Exception as error:
        receiver.fail(f"{type(error).__name__}: {error}")
        raise


def load(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load checkpoint-format `weights` into a live SGLang model. ValueError unless every parameter got all of its value.

    In one call: some models compute what follows from all weights at its end. What is not loaded stays NaN, which is
    seen whoever loads: SGLang loads in threads, and passes a name that it does not know over with a warning of its own.
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
            "export does not have all the weights that they are made of, or holds NaN"
        )
