"""The weight versions of the tokens of requests that run during updates."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megarl.engines.backed import BackedEngine
from megarl.engines.base import EngineSpec
from megarl.engines.spans import RequestSpans
from megarl.types import Completion, GenerationRequest, Prompt, Sampling, Span


def sample(length: int) -> Completion:
    return Completion(np.zeros(length, np.int32), np.zeros(length, np.float32), "stop")


def test_a_request_without_an_update_has_one_span() -> None:
    spans = RequestSpans()
    spans.update(7, {})
    spans.admit("a")
    assert [each.spans for each in spans.finish("a", [sample(3), sample(0)])] == [(Span(0, 7),)] * 2


def test_each_update_starts_a_span_at_the_tokens_so_far() -> None:
    spans = RequestSpans()
    spans.admit("a")
    spans.update(1, {"a": {0: 4, 1: 2}})
    spans.admit("b")
    spans.update(2, {"a": {1: 5}, "b": {0: 3}})  # sample 0 of "a" has finished
    first, second = spans.finish("a", [sample(5), sample(9)])
    assert first.spans == (Span(0, 0), Span(4, 1))
    assert second.spans == (Span(0, 0), Span(2, 1), Span(5, 2))
    assert spans.finish("b", [sample(4)])[0].spans == (Span(0, 1), Span(3, 2))


def test_an_update_before_the_next_token_replaces_the_span() -> None:
    spans = RequestSpans()
    spans.admit("a")
    spans.update(1, {"a": {0: 0}})  # before the first token
    spans.update(2, {"a": {0: 6}})
    spans.update(3, {"a": {0: 6}})
    assert spans.finish("a", [sample(8)])[0].spans == (Span(0, 1), Span(6, 3))


class CountingBackend:
    """Each running request gets a token per step. The engine's thread waits in a step for `gate`."""

    unloaded = None
    staged = None
    asleep: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.requests: dict[str, GenerationRequest] = {}
        self.gate, self.in_step = threading.Semaphore(0), threading.Event()

    def start(self) -> dict[str, Any]:
        return {}

    def check(self, request: GenerationRequest) -> None: ...

    def admit(self, key: str, request: GenerationRequest) -> None:
        self.tokens[key], self.requests[key] = 0, request

    def step(self) -> list[tuple[str, list[Completion]]]:
        self.in_step.set()
        self.gate.acquire(timeout=10)
        for key in self.tokens:
            self.tokens[key] += 1
        ended = [key for key, count in self.tokens.items() if count == self.requests[key].sampling.max_tokens]
        return [(key, [sample(self.tokens.pop(key))]) for key in ended]

    def lengths(self, key: str) -> dict[int, int]:
        return {0: self.tokens[key]}

    def update_weights(self, version: int, running: int) -> str:
        return f"{running} running"

    def shutdown(self) -> None: ...


def test_completions_of_an_engine_have_the_versions_of_its_updates() -> None:
    backend = CountingBackend()
    engine = BackedEngine(backend, EngineSpec("e0", "path", "float32", 64))  # type: ignore[arg-type]
    engine.start()
    requests = [
        GenerationRequest(group, Prompt("p", (1,), "", "x"), Sampling(1, tokens), 0)
        for group, tokens in ((0, 2), (1, 5))
    ]
    done: dict[int, Completion] = {}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(engine.generate, requests, lambda group, samples: done.update({group: samples[0]}))
        backend.in_step.wait(10)
        update = pool.submit(engine.update_weights, 1)  # runs after the step that waits
        while engine._commands.empty() and not update.done():
            pass
        backend.gate.release(5)
        assert update.result(10) == "2 running"
        running.result(10)
    engine.shutdown()
    assert done[0].spans == (Span(0, 0), Span(1, 1))
    assert done[1].spans == (Span(0, 0), Span(1, 1))
