"""A real vLLM continues requests of another one with its weights, which are newer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import Recipe, RewardConfig
from megarl.rewards.weighted import Term
from megarl.rollout import server as server_module
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.server import RolloutServer
from megarl.rollout.source_engines import EnginesSource
from megarl.types import Completion, GenerationRequest, InlineData, Partial, Prompt, Sampling, Span
from tests.engines.test_vllm_in_flight import EXACT, LONG, InFlight
from tests.rollout.test_source import Prompts
from tests.support.engine_process import EngineProcess, gaps, load_model, make_requests, reference, same, spec

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


@pytest.mark.slow
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


class RemoteEngine:
    """The engine of a process, for a `RolloutServer` in this one."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process

    def generate(self, requests: list[GenerationRequest], on_finished: Callable[[int, list[Completion]], None]) -> None:
        for group, samples in self.process.generate(requests)[1].items():
            on_finished(group, samples)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self.process, method)


class LocalService:
    """Runs a server's methods on an event loop of this process."""

    def __init__(self, name: str, server: RolloutServer, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.server, self.loop = name, server, loop

    def call(self, method: str, *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(self.server, method)(*arguments), self.loop)

    def call_with_parts(self, method: str, parts: int) -> Any:
        async def with_parts() -> Any:
            control, vectors = await getattr(self.server, method)(parts)
            return control, [InlineData(each) for each in vectors]

        return asyncio.run_coroutine_threadsafe(with_parts(), self.loop)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.mark.slow
def test_the_groups_of_an_engine_move_to_another(
    processes: list[EngineProcess],
    quickstart_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Every group arrives with the log-probs of the model, in whichever engines its tokens were sampled."""
    path, services = str(quickstart_data / "model"), []
    for number, process in enumerate(processes):
        process.start(spec(path, name=f"engine{number}", at_update="refresh", engine_args={"block_size": 32}))
        monkeypatch.setattr(server_module.engines, "create", lambda *_, process=process: RemoteEngine(process))
        server = RolloutServer("vllm", None, path, RewardConfig(), [], SandboxConfig())  # type: ignore[arg-type]
        scorer = server_module.rewards.Scorer("mine", lambda request: 1.0, in_process=True)
        server.scoring.terms = {"test": (Term(scorer),)}
        services.append(LocalService(f"engine{number}", server, loop))
    recipe = Recipe()
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.train.steps = 4, 2, 10
    recipe.cluster.placement, recipe.rollout.max_staleness = "disaggregated", 1
    recipe.rollout.max_response_length, recipe.algorithm.overlong.penalty_buffer = LONG, 0
    prompts = Prompts(Prompt(f"row/{i}", (4 + i, 5, 6), "", "test") for i in range(7))
    source = EnginesSource(recipe, prompts, [EngineHandle(each) for each in services], [], lambda: None)  # type: ignore[arg-type]
    try:
        source.admit(0)
        begun: list[Any] = []
        while not begun:
            copied = source.engines[0].copy_partials(0).result(60)
            begun = [partial for partials in copied.values() for partial in partials if len(partial.tokens) > 4]
        assert sorted(source.moves.owners.of(0)) == [0, 2, 4, 6]
        source.moves.move(0)
        batches = [source.take(4) for _ in range(2)]
    finally:
        for process in processes:
            process.shutdown()
    assert sum(batch.metrics.get("rollout/tokens_taken_over", 0) for batch in batches) > 4
    groups = [group for batch in batches for group in batch.groups]
    assert sorted(group.number for group in groups) == list(range(8))
    model = load_model(path)
    for sample in [sample for group in groups for sample in group.samples[0].data.get()]:
        assert len(sample.tokens) == 3 + LONG
        expected = reference(model, sample.tokens[:3].tolist(), sample.tokens[3:].tolist()).numpy()
        log_probs = expected[np.arange(LONG), sample.tokens[3:]]
        assert np.abs(log_probs - sample.rollout_log_probs[3:]).max() < EXACT
