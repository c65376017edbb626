"""A real vLLM continues requests of another one with its weights, which are newer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.types import Completion, GenerationRequest, Partial, Sampling, Span
from tests.engines.test_vllm_in_flight import EXACT, LONG, InFlight
from tests.support.engine_process import EngineProcess, gaps, make_requests, reference, same

pytestmark = pytest.mark.stack

STOPS = (5, 6)  # some samples meet them before the hand-over, some after it, and some never


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    processes = [EngineProcess(), EngineProcess()]
    yield processes
    for process in processes:
        process.close()


def assert_continues(sample: Completion, partial: Partial, version: int) -> None:
    """The tokens so far are kept, and the following ones have the version of the second engine."""
    length = len(partial.tokens)
    assert np.array_equal(sample.tokens[:length], partial.tokens)
    assert np.array_equal(sample.log_probs[:length], partial.log_probs, equal_nan=True)
    if partial.finish_reason is None:
        assert len(sample.tokens) > length and sample.spans == (*partial.spans, Span(length, version))
    else:
        assert (len(sample.tokens), sample.spans, sample.finish_reason) == (
            length,
            partial.spans,
            partial.finish_reason,
        )


def assert_follows(engine: InFlight, request: GenerationRequest, sample: Completion) -> None:
    """Each span has the log-probs of its version's weights; greedy tokens are its likeliest ones."""
    for span, end in zip(sample.spans, [*(each.start for each in sample.spans[1:]), len(sample.tokens)], strict=True):
        model = engine.models[span.version]
        if request.sampling.temperature:
            assert gaps(model, request, sample)[span.start : end].max() < EXACT
        else:
            likeliest = reference(model, request.prompt.tokens, sample.tokens.tolist()).argmax(-1).numpy()
            assert np.array_equal(likeliest[span.start : end], sample.tokens[span.start : end])


def test_an_engine_continues_requests_of_another(processes: list[EngineProcess], tmp_path: Path) -> None:
    """Engine 0 has the weights of version 0, then 1; engine 1 has version 2. One group is greedy."""
    first, second = (InFlight(each, tmp_path / str(n), at_update="refresh") for n, each in enumerate(processes))
    try:
        shorts = [
            replace(each, sampling=Sampling(1, tokens)) for each, tokens in zip(make_requests(2), (5, 30), strict=True)
        ]
        requests = [
            replace(each, group=each.group + 10) for each in make_requests(5, max_tokens=LONG, stop_token_ids=STOPS)
        ]
        requests[0] = replace(requests[0], sampling=Sampling(1, LONG, temperature=0))
        running = first.process.begin("generate", [*shorts, *requests])
        for short, act in zip(shorts, (lambda: first.update(1), lambda: first.process.copy_running(1)), strict=True):
            while short.group not in first.process.finished():
                time.sleep(0.001)
            first.process.pause()
            copies = act()
            moved = first.process.hand_over(None) if short is shorts[1] else []
            first.process.resume()
        assert running.result(60)[0] == [0, 1]
        assert [request.group for request in moved] == [request.group for request in requests]
        copied = [partial for request in copies for partial in request.partials]
        for copy, original in zip(copied, [each for request in moved for each in request.partials], strict=True):
            assert copy.tokens.tolist() == original.tokens.tolist() and copy.spans == original.spans, (
                "nothing ran in between"
            )
        mixed = [{partial.finish_reason for partial in request.partials} for request in moved]
        assert {None, "stop"} in mixed, "no group has finished and unfinished samples"

        second.update(1)
        second.update(2)
        samples = second.process.generate(moved)[1]
        for request in moved:
            for sample, partial in zip(samples[request.group], request.partials, strict=True):
                assert_continues(sample, partial, version=2)
                assert_follows(second, replace(request, partials=()), sample)
        assert same({n: each for n, each in samples.items() if n != 10}, second.process.generate(moved)[1]), "seeds"
    finally:
        for engine in (first, second):
            engine.sender.close()
            engine.process.shutdown()
