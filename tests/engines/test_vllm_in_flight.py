"""A real vLLM takes new weights while requests run: each token has the version and the log-prob of the weights that sampled it.

`tests/engines/test_older_vllm.py` runs this file on older vLLM versions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.types import Completion, GenerationRequest, Prompt, Sampling, Span
from tests.support.engine_process import (
    EngineProcess,
    assert_exact,
    build_model,
    change,
    full_sender,
    load_model,
    make_requests,
    spec,
)
from tests.support.span_gaps import EXACT, span_gaps, with_kept_cache

pytestmark = pytest.mark.stack

LONG = 100  # tokens of the requests that run during the updates


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    process = EngineProcess()
    yield process
    process.close()


class InFlight:
    """An engine and updates of its weights while requests run. `models`: Hugging Face models by version."""

    def __init__(self, process: EngineProcess, folder: Path, **settings: Any) -> None:
        self.process, self.folder = process, folder
        path = build_model(folder / "model")
        self.models = {0: load_model(path)}
        self.info = process.start(spec(path, engine_args={"block_size": 32}, **settings))
        assert self.info["can_update_in_flight"]
        self.sender = full_sender(process, self.info)

    def update(self, version: int) -> None:
        model = load_model(self.folder / "model" if version == 1 else self.folder / str(version - 1))
        (self.folder / str(version)).mkdir()
        weights = change(model, version, self.folder / str(version))
        self.models[version] = model
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.sender.send, version, weights.items)
            self.process.update_weights(version)
            sending.result(60)

    def run(self, first_version: int = 1) -> tuple[list[GenerationRequest], dict[int, list[Completion]]]:
        """Sample requests of `LONG` tokens, and change the weights when two shorter requests have finished."""
        first, second, *long = make_requests(5, max_tokens=LONG)
        shorts = [
            dataclasses.replace(first, sampling=Sampling(1, 3)),
            dataclasses.replace(second, sampling=Sampling(1, 40)),
        ]
        running = self.process.begin("generate", [*shorts, *long])
        for version, short in enumerate(shorts, first_version):
            while short.group not in self.process.finished():
                time.sleep(0.001)
            self.process.pause()
            self.update(version)
            assert not running.done()
            self.process.resume()
        return long, running.result(120)[1]


def test_refreshed_requests_follow_each_new_policy_exactly(process: EngineProcess, tmp_path: Path) -> None:
    engine = InFlight(process, tmp_path, at_update="refresh")
    try:
        requests, samples = engine.run()
        for request in requests:
            for sample in samples[request.group]:
                assert [span.version for span in sample.spans] == [0, 1, 2] and sample.spans[0].start == 0
                for _, exact, other in span_gaps(engine.models, request, sample):
                    assert exact.max() < EXACT and other[0] > EXACT, "a span starts exactly at its first token"
        after = make_requests(3, seed=9)
        assert_exact(engine.models[2], after, process.generate(after)[1])
    finally:
        engine.sender.close()
        process.shutdown()


def test_requests_finish_with_the_weights_that_they_started_with(process: EngineProcess, tmp_path: Path) -> None:
    """Both updates wait in host memory; the second takes the place of the first."""
    engine = InFlight(process, tmp_path, at_update="finish")
    try:
        engine.update(1)  # the first of a session is direct
        requests, samples = engine.run(first_version=2)
        for request in requests:
            assert [sample.spans for sample in samples[request.group]] == [(Span(0, 1),)] * request.sampling.n
        assert_exact(engine.models[1], requests, samples)
        assert process.load_weights() == 3
        assert_exact(engine.models[3], requests, process.generate(requests)[1])
    finally:
        engine.sender.close()
        process.shutdown()


def test_kept_requests_continue_and_no_old_prefix_is_reused(process: EngineProcess, tmp_path: Path) -> None:
    """The new weights read the KV cache of the old ones. Requests after an update do not."""
    engine = InFlight(process, tmp_path, at_update="keep")
    try:
        prompt = tuple(np.random.default_rng(4).integers(3, 200, 80).tolist())  # more than two blocks
        cached = [GenerationRequest(50, Prompt("p", prompt, "", "x"), Sampling(2, 4), 7)]
        assert_exact(engine.models[0], cached, process.generate(cached)[1])
        requests, samples = engine.run()
        shifted = []
        for request in requests:
            for sample in samples[request.group]:
                assert [span.version for span in sample.spans] == [0, 1, 2]
                assert np.abs(with_kept_cache(engine.models, request, sample) - sample.log_probs).max() < EXACT
                shifted += [exact.max() for span, exact, _ in span_gaps(engine.models, request, sample) if span.version]
        assert min(shifted) > EXACT, "the KV cache was recomputed"
        assert_exact(engine.models[2], cached, process.generate(cached)[1])
    finally:
        engine.sender.close()
        process.shutdown()


@pytest.mark.slow
def test_a_kept_cache_is_recomputed_when_it_is_too_old(process: EngineProcess, tmp_path: Path) -> None:
    """The first update leaves caches that are one version old, the second would leave them two versions old."""
    engine = InFlight(process, tmp_path, at_update="keep", refresh_after=2)
    try:
        requests, samples = engine.run()
        for request in requests:
            for sample in samples[request.group]:
                (_, start, _), (_, kept, _), (_, refreshed, _) = span_gaps(engine.models, request, sample)
                assert start.max() < EXACT and refreshed.max() < EXACT and kept.max() > EXACT
    finally:
        engine.sender.close()
        process.shutdown()
