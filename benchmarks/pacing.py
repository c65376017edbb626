"""Steps of engines and trainers that take given seconds: a real run in which compute takes device time and not CPU time.

A process with `benchmarks/paced_site` on its PYTHONPATH and `MEGARL_PACE` in its environment calls `install`. Each operation does
its real work and then sleeps until its seconds are over, so processes on few cores do not slow each other down.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.worker_hook import after_import

VARIABLE = "MEGARL_PACE"


@dataclass(frozen=True)
class Pace:
    """Seconds of each operation. They should exceed the CPU time of the operation severalfold."""

    step: float  # a step of an engine, without requests
    request: float  # more of each request in the step
    prefill: float  # more of each token in the step beyond one of a request
    train: float  # a trained token, prompts included, of the only trainer
    weight_sync: float  # an update of the engines' weights, from its call
    load: float  # weights from an engine's host memory

    def environment(self) -> dict[str, str]:
        """Return the environment variable that `read` reads."""
        return {VARIABLE: json.dumps(asdict(self))}


def read() -> Pace | None:
    """Return the pace of this process; None if the environment has none."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Pace(**json.loads(text))


def install() -> None:
    """Pace the engines and trainers of this process, once their modules are imported."""
    pace = read()
    if pace is not None:
        after_import("megarl.engines.vllm.engine", lambda module: pace_engine(module._VllmBackend, pace))
        after_import("megarl.trainer.actor", lambda module: pace_trainer(module.ActorWorker, pace))


def pace_engine(backend: type[Any], pace: Pace) -> None:
    """Pace the steps and updates of vLLM. `backend`: the class that drives it."""
    step = backend.step

    @functools.wraps(step)
    def paced(self: Any) -> Any:
        scheduled = _scheduled(self._engine.engine_core.engine_core.scheduler)
        scheduled.clear()
        begin = time.monotonic()
        result = step(self)
        _sleep_until(begin + sum(step_seconds(counts, pace) for counts in scheduled))
        return result

    backend.step = paced
    backend.update_weights = _at_least(backend.update_weights, pace.weight_sync)
    load = backend.load_weights

    @functools.wraps(load)
    def load_weights(self: Any, running: int) -> int:
        return _at_least(load, pace.load if self.staged is not None else 0.0)(self, running)

    backend.load_weights = load_weights


def _scheduled(scheduler: Any) -> list[list[int]]:
    """Return the list to which `scheduler` adds the tokens of each request in a step; the first call starts it."""
    recorded_steps: list[list[int]] | None = getattr(scheduler, "_paced_steps", None)
    if recorded_steps is not None:
        return recorded_steps
    steps: list[list[int]] = []
    schedule = scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append(list(output.num_scheduled_tokens.values()))
        return output

    scheduler.schedule, scheduler._paced_steps = recorded, steps
    return steps


def step_seconds(counts: list[int], pace: Pace) -> float:
    """Return the seconds of a step that computes `counts` tokens of its requests."""
    if not counts:
        return 0.0
    return pace.step + pace.request * len(counts) + pace.prefill * (sum(counts) - len(counts))


def pace_trainer(worker: type[Any], pace: Pace) -> None:
    """Pace a training step, from the arrival of the samples to the end of the update."""
    load_shard, update_actor = worker.load_shard, worker.update_actor

    @functools.wraps(load_shard)  # megarl calls methods of trainers by name
    def paced_load(self: Any, shard: Any) -> None:
        self._paced_until = time.monotonic() + pace.train * sum(sample.length for sample in shard.samples)
        load_shard(self, shard)

    @functools.wraps(update_actor)
    def paced_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update_actor(self, *args, **kwargs)
        _sleep_until(self._paced_until)
        return result

    worker.load_shard, worker.update_actor = paced_load, paced_update


def _at_least(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return `call`, made to take `seconds` or more."""

    @functools.wraps(call)
    def paced(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        result = call(*args, **kwargs)
        _sleep_until(begin + seconds)
        return result

    return paced


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.monotonic()))
