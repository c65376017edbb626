"""The source with `rollout.at_update: finish`: engines load weights when they have no group."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.source_engines import EnginesSource
from megarl.types import Prompt
from tests.rollout.test_source import ManualService, Prompts, refreshing


class LoadingService(ManualService):
    """Receives weights with `receive`, and loads them when `load` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self.loading: list[Future[int]] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "submit":
            return super().call(method, *arguments)
        assert method == "load_weights" and not self.running, "groups run"
        self.loading.append(Future())
        return self.loading[-1]

    def load(self) -> None:
        self.loading.pop().set_result(self.received)


def finishing(*services: LoadingService, **rollout: Any) -> EnginesSource:
    recipe = refreshing(services[0], at_update="finish", window=0.0, **rollout).recipe
    prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
    return EnginesSource(recipe, prompts, [EngineHandle(each) for each in services], [0], lambda: None)  # type: ignore[arg-type]


def test_engines_load_weights_in_turn_when_their_groups_have_finished() -> None:
    first, second = LoadingService(), LoadingService()
    engines_source = finishing(first, second)
    engines_source.admit(0)
    assert (sorted(first.running), sorted(second.running)) == ([0, 2, 4, 6], [1, 3, 5, 7])
    first.finish(0, 2)
    second.finish(1, 3)
    engines_source.take(4)
    engines_source.drain()  # returns, although groups run
    first.received = second.received = 1
    engines_source.admit(1)
    assert sorted(first.running) == [4, 6], "with version 0, no further group may start"
    first.finish(6, 4)
    first.load()
    assert sorted(first.running) == [8, 9, 10, 11] and not second.loading
    second.finish(5, 7)
    assert len(second.loading) == 1 and not first.loading


def after_one_batch() -> tuple[EnginesSource, LoadingService, LoadingService]:
    """Return a source and its engines: both have received version 1, the first has no group, the second runs 5 and 7."""
    first, second = LoadingService(), LoadingService()
    engines_source = finishing(first, second)
    engines_source.admit(0)
    first.finish(0, 2, 4, 6)
    second.finish(1, 3)
    assert engines_source.take(4).metrics["rollout/engines_behind"] == 0
    first.received = second.received = 1
    return engines_source, first, second


def test_all_engines_load_the_weights_before_an_evaluation() -> None:
    engines_source, first, second = after_one_batch()

    def finish() -> None:
        first.load()
        second.finish(5, 7)
        second.load()

    threading.Timer(0.05, finish).start()
    engines_source.load_newest(1)
    assert not (first.loading or second.loading)


def test_an_engine_that_cannot_load_weights_ends_the_run() -> None:
    engines_source = finishing(service := LoadingService())
    engines_source.admit(0)
    service.finish(*range(8))
    engines_source.take(4)
    engines_source.admit(1)
    service.loading.pop().set_exception(RuntimeError("no memory"))
    with pytest.raises(RuntimeError, match="no memory"):
        engines_source.take(4)


def test_an_engine_that_does_not_end_loading_is_named() -> None:
    engines_source = finishing(service := LoadingService(), start_timeout=0.5)
    engines_source.admit(0)
    service.finish(*range(8))
    engines_source.take(4)
    engines_source.take(4)
    engines_source.admit(1)
    with pytest.raises(RuntimeError, match=r"engine0 has not loaded new weights .*rollout\.start_timeout"):
        engines_source.take(4)


def test_loads_are_measured() -> None:
    engines_source, first, second = after_one_batch()
    engines_source.admit(1)
    time.sleep(0.05)
    first.load()
    second.finish(5, 7)
    metrics = engines_source.take(4).metrics
    assert metrics["rollout/engines_behind"] == 1 and 0.05 <= metrics["rollout/load_seconds"] < 5
