"""A rollout process around its engine: its calls of the engine, and the returned groups."""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megarl.cluster.failures import CallFailed
from megarl.data.images import ImageReader
from megarl.engines.backed import BackedEngine
from megarl.engines.base import EngineDead, EngineRefused, EngineSpec
from megarl.engines.tape import TapeSpec
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards.weighted import Term
from megarl.rollout import server as module
from megarl.rollout.server import RolloutServer
from megarl.types import Completion, GenerationRequest, Group, Prompt, PromptImage, PromptVideo, SampleTokens, Sampling
from tests.support.collecting import CollectedGroups
from tests.support.counting_engine import CountingBackend
from tests.support.counting_engine import request as sized
from tests.support.vl_model import PATCH_VALUES, write_processor, write_video_processor, write_vl_model


class Engine:
    """Answer the requests of a wave from the last to the first, or in the order of `order`."""

    def __init__(self, order: Callable[[list[GenerationRequest]], list[GenerationRequest]] = lambda wave: wave[::-1]):
        self.order, self.requests = order, list[GenerationRequest]()

    def generate(self, requests: list[GenerationRequest], finished: Callable[[int, list[Completion]], None]) -> None:
        self.requests += requests
        for request in self.order(requests):
            sampled, greedy = (
                Completion(np.full(length, 7, np.int32), np.zeros(length, np.float32), "stop") for length in (3, 5)
            )
            finished(request.group, [sampled] * request.sampling.n + [greedy] * request.with_greedy)


@pytest.fixture
def serve(quickstart_data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], RolloutServer]:
    def make_server(engine: Engine) -> RolloutServer:
        monkeypatch.setattr(module.engines, "create", lambda name, spec: engine)
        server = RolloutServer("fake", None, str(quickstart_data / "model"), RewardConfig(), [], SandboxConfig())  # type: ignore[arg-type]
        score_with(server, lambda request: float(len(request.response)))
        return server

    return make_server


def score_with(server: RolloutServer, function: Callable[[module.rewards.ScoreRequest], Any]) -> None:
    server.scoring.terms = {"test": (Term(module.rewards.Scorer("mine", function, in_process=True)),)}


def test_step_rewards_are_on_the_tokens_that_end_them(serve: Callable[[Engine], RolloutServer]) -> None:
    """Places count the prompt's two tokens. Token 7 is a character; a step ends at the first and at the third."""
    server = serve(Engine())
    text = server.tokenizer.decode([7, 7, 7])
    assert len(text) == 3
    steps = [(1, 0.25), (3, -0.5)]
    score_with(server, lambda request: {"score": 1, "steps": steps})
    for group in run(server, requests(with_greedy=True)):
        for sample in group.samples:
            assert sample.steps == ((2, 0.25), (4, -0.5))
            assert sample.reward == 0.75 and sample.outcome == 1.0 and sample.reward_parts == {"steps": -0.25}
        assert group.greedy is not None and group.greedy.steps == ((2, 0.25), (4, -0.5))


def test_a_group_knows_how_long_it_was_scored(serve: Callable[[Engine], RolloutServer]) -> None:
    server = serve(Engine())
    score_with(server, lambda request: time.sleep(0.05) or 1.0)
    for group in run(server, requests(with_greedy=False)):
        assert group.scoring_seconds >= 0.05


def test_a_step_beyond_the_response_fails_its_sample(serve: Callable[[Engine], RolloutServer]) -> None:
    server = serve(Engine())
    score_with(server, lambda request: {"score": 1, "steps": [(9, 1)]})
    for group in run(server, requests(with_greedy=False)):
        assert "ends at character 9, and the response has 3" in str(group.failures[0])


def test_a_failed_score_is_nan_with_a_named_failure(serve: Callable[[Engine], RolloutServer]) -> None:
    """The score is not replaced by zero, which would be learned. The greedy sample (5 tokens) fails twice, with its group."""
    server = serve(Engine())

    def greedy_fails(request: module.rewards.ScoreRequest) -> float:
        if len(request.response) == 5:
            raise ZeroDivisionError("no such luck")
        return 0.25

    score_with(server, greedy_fails)
    for group in run(server, requests(with_greedy=True)):
        assert [sample.reward for sample in group.samples] == [0.25, 0.25]
        assert group.greedy is not None and math.isnan(group.greedy.reward)
        (failure,) = group.failures
        assert (failure.source, failure.uid, failure.kind, failure.attempts) == ("scorer 'mine'", "row", "error", 2)
        assert "ZeroDivisionError: no such luck" in failure.cause and group.scoring_retries == 1


def test_a_scorer_in_separate_processes(quickstart_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe names the scorer; other processes import it, and it ends with the server, as in a run."""
    engine = Engine()
    monkeypatch.setattr(module.engines, "create", lambda name, spec: engine)
    reward = RewardConfig(function="tests.support.scorers:brevity", processes=2)
    server = RolloutServer("fake", None, str(quickstart_data / "model"), reward, ["test"], SandboxConfig())  # type: ignore[arg-type]
    (pool,) = server.scoring.pools.values()
    server.scoring.start()
    try:
        groups = run(server, requests(with_greedy=False))
    finally:
        server.scoring.close()
    assert [sample.reward for group in groups for sample in group.samples] == [0.97] * 6  # of three characters
    assert pool._fork_server.poll() == 0


def requests(with_greedy: bool) -> list[GenerationRequest]:
    sampling = Sampling(2, 16, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(1,))
    prompt = Prompt("row", (3, 4), "text", "test")
    return [GenerationRequest(number, prompt, sampling, 10 * number, with_greedy=with_greedy) for number in range(3)]


def run(server: RolloutServer, wave: list[GenerationRequest]) -> list[Group]:
    async def all_of_it() -> list[Group]:
        await server.submit(wave)
        finished = CollectedGroups(server)
        return [(await finished.collect(request.group))[0] for request in wave]

    return asyncio.run(asyncio.wait_for(all_of_it(), timeout=20))


def test_groups_without_samples_fail_with_the_engine(serve: Callable[[Engine], RolloutServer]) -> None:
    """A group that was sampled before the failure has its result. The others raise the error, as `submit` does."""

    class Dying(Engine):
        def generate(self, requests: list[GenerationRequest], finished: Callable[..., None]) -> None:
            super().generate(requests[:1], finished)
            raise EngineDead("engine 'fake' died")

    server, wave = serve(Dying()), requests(with_greedy=False)

    async def outcomes() -> list[Any]:
        finished = CollectedGroups(server)
        collected = [finished.collect(request.group) for request in wave]
        return await asyncio.gather(server.submit(wave), *collected, return_exceptions=True)

    submitted, (group, _), *failed = asyncio.run(asyncio.wait_for(outcomes(), timeout=20))
    assert group.number == 0 and len(group.samples) == 2
    assert isinstance(submitted, EngineDead) and len(failed) == 2
    assert all(error.failure.cause == "EngineDead: engine 'fake' died" for error in failed)
    assert not server._finished


@pytest.mark.parametrize("call", ["update_weights", "connect_weight_sync", "sleep", "wake", "start_profile", "watch"])
def test_no_other_call_waits_for_a_thread_of_generate(serve: Callable[[Engine], RolloutServer], call: str) -> None:
    """All threads of `generate` are in use, as with many turns of agents."""
    released, passed = threading.Event(), []

    class Busy(Engine):
        def generate(self, requests: list[GenerationRequest], finished: Callable[..., None]) -> None:
            assert released.wait(20)
            super().generate(requests, finished)

        def __getattr__(self, name: str) -> Callable[..., object]:
            return lambda *args: passed.append((name, *args))

    server, wave = serve(Busy()), requests(with_greedy=False)
    server.calls = ThreadPoolExecutor(max_workers=1)
    arguments = () if call in ("sleep", "watch") else (1,)

    async def calls() -> None:
        submitted = asyncio.ensure_future(server.submit(wave))
        await asyncio.sleep(0.05)  # `generate` has the only thread
        try:
            await asyncio.wait_for(getattr(server, call)(*arguments), timeout=5)
        finally:
            released.set()
        await submitted

    asyncio.run(calls())
    assert passed == [(call, *arguments)]


def test_held_calls_of_a_replay_leave_threads_for_the_next_call(
    quickstart_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of many turns to arrive is the first on the tape: the engine holds the others until then."""
    arrived = threading.Event()

    class Holding(Engine):
        def generate(self, requests: list[GenerationRequest], finished: Callable[..., None]) -> None:
            if requests[0].group == 1024:
                arrived.set()
            assert arrived.wait(10)

    engine = Holding()
    monkeypatch.setattr(module.engines, "create", lambda name, spec: engine)
    spec = EngineSpec("engine0", "model", "float32", 64, tape=TapeSpec("tape", 0, "recorded", 0))
    model = str(quickstart_data / "model")
    server = RolloutServer("fake", spec, model, RewardConfig(), [], SandboxConfig())
    single = requests(with_greedy=False)[0]

    async def turns() -> None:
        await asyncio.gather(*(server._generate([replace(single, group=n)], lambda *_: None) for n in range(1025)))

    asyncio.run(turns())
    server.calls.shutdown()


@pytest.mark.parametrize("kind", ["image", "video"])
def test_images_are_prepared_by_the_server(
    kind: str, quickstart_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A prompt comes with a file, or with a video of one frame twice; the engine receives pixels, and siblings share them."""
    write_vl_model(tmp_path)
    write_processor(tmp_path)
    write_video_processor(tmp_path, "Qwen2VLVideoProcessor", 3136, 40_000)
    picture = io.BytesIO()
    Image.new("RGB", (56, 56), "white").save(picture, format="PNG")
    engine = Engine()
    monkeypatch.setattr(module.engines, "create", lambda name, spec: engine)
    model, reader = str(quickstart_data / "model"), ImageReader(str(tmp_path))
    server = RolloutServer("fake", None, model, RewardConfig(), [], SandboxConfig(), reader)  # type: ignore[arg-type]
    score_with(server, lambda request: 1.0)
    first, *remaining = requests(with_greedy=True)
    image = PromptImage("row, image 0", picture.getvalue(), "", tokens=4, start=1)
    video = PromptVideo("row, video 0", (image, image), 2.0, tokens=4, starts=(1,))
    shown: dict[str, Any] = {"images": (image,)} if kind == "image" else {"videos": (video,)}
    seen = replace(first.prompt, tokens=(3, 250, 250, 250, 250, 4), **shown)

    async def vectors() -> list[list[SampleTokens]]:
        await server.submit([replace(first, prompt=seen), *remaining])
        finished = CollectedGroups(server)
        return [(await finished.collect(number))[1] for number in range(3)]

    (first_vectors, other), *rest = asyncio.run(asyncio.wait_for(vectors(), timeout=60))
    assert (
        first_vectors.images is not None
        and first_vectors.images is other.images
        and first_vectors.images.starts.tolist() == [1]
    )
    assert first_vectors.images.pixels.shape == (16, PATCH_VALUES) and first_vectors.images.grids.tolist() == [
        [1, 4, 4]
    ]
    assert all(sample.images is None for group in rest for sample in group)
    images = {request.group: request.images for request in engine.requests}
    assert images[0] is first_vectors.images and images[1] is None


def test_a_damaged_image_fails_only_its_group(
    quickstart_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A truncated file has a readable header; the missing data is noticed when the group is sampled."""
    write_vl_model(tmp_path)
    write_processor(tmp_path)
    picture = io.BytesIO()
    Image.effect_noise((56, 56), 50).convert("RGB").save(picture, format="PNG")
    engine = Engine()
    monkeypatch.setattr(module.engines, "create", lambda name, spec: engine)
    reader = ImageReader(str(tmp_path))
    server = RolloutServer("fake", None, str(quickstart_data / "model"), RewardConfig(), [], SandboxConfig(), reader)  # type: ignore[arg-type]
    score_with(server, lambda request: 1.0)
    first, *rest = requests(with_greedy=True)
    image = PromptImage("row 7, image 0", picture.getvalue()[:2000], "", tokens=4, start=1)
    damaged = replace(first.prompt, tokens=(3, 250, 250, 250, 250, 4), images=(image,))
    bad, *good = run(server, [replace(first, prompt=damaged), *rest])
    assert "row 7, image 0 cannot be decoded" in str(bad.failures[0])
    assert all(math.isnan(sample.reward) for sample in [*bad.samples, bad.greedy] if sample)
    assert not any(group.failures for group in good) and 0 not in {request.group for request in engine.requests}


def test_groups_are_returned_with_scores(serve: Callable[[Engine], RolloutServer]) -> None:
    engine = Engine()
    groups = run(serve(engine), requests(with_greedy=False))
    assert [request.group for request in engine.requests] == [0, 1, 2]
    assert [group.number for group in groups] == [0, 1, 2]
    assert all(len(group.samples) == 2 and group.greedy is None for group in groups)
    assert all(sample.response_length == 3 and sample.reward > 0 for group in groups for sample in group.samples)


def test_the_last_sample_is_the_greedy_one(serve: Callable[[Engine], RolloutServer]) -> None:
    for group in run(serve(Engine()), requests(with_greedy=True)):
        assert group.greedy is not None and len(group.samples) == 2
        assert (group.greedy.response_length, group.samples[0].response_length) == (5, 3)
        assert group.greedy.reward > group.samples[0].reward


def test_groups_move_to_another_server(serve: Callable[[Any], RolloutServer]) -> None:
    """Group 1 has a finished and an unfinished sample and a greedy one. Its `collect` at the first server fails; group 2
    stays there; group 0 is sampled already and is not handed over."""
    backends = [CountingBackend(0), CountingBackend(0)]
    started = []
    for backend in backends:
        engine = BackedEngine(backend, EngineSpec("e0", "model", "float32", 64))  # type: ignore[arg-type]
        engine.start()
        started.append(serve(engine))  # type: ignore[arg-type]
    first, second = started
    wave = [sized(0, (2, 1)), sized(1, (3, 8), with_greedy=True), sized(2, (5, 6))]

    async def sampled_by(*servers: RolloutServer) -> list[Any]:
        submitted = asyncio.ensure_future(first.submit(wave))
        finished = CollectedGroups(first)
        collected = [asyncio.ensure_future(finished.collect(number)) for number in range(3)]
        while len(backends[0].admitted) < 4:
            await asyncio.sleep(0.001)
        backends[0].let_step(4)
        await collected[0]
        while backends[0].allowed._value:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        assert {number: len(each) for number, each in (await first.copy_partials(1)).items()} == {1: 3, 2: 2}
        moved = await first.hand_over([0, 1])
        assert list(moved) == [1]
        assert [(len(each.tokens), each.finish_reason) for each in moved[1]] == [(3, "stop"), (4, None), (4, None)]
        with pytest.raises(CallFailed, match="EngineRefused: it was handed over"):
            await collected[1]
        resumed = asyncio.ensure_future(second.submit([replace(wave[1], partials=moved[1])]))
        for backend in backends:
            backend.let_step(4)
        (group, tokens), _, _, _ = await asyncio.gather(
            CollectedGroups(second).collect(1), collected[2], submitted, resumed
        )
        assert [sample.response_length for sample in [*group.samples, group.greedy]] == [3, 8, 8]
        assert np.array_equal(tokens[1].tokens[-8:-4], moved[1][1].tokens)
        return [len(server._finished) or server._unsettled for server in servers]

    assert asyncio.run(asyncio.wait_for(sampled_by(first, second), 20)) == [[], []]
    for server in started:
        server.engine.shutdown()


def test_samples_of_agent_loops_are_not_handed_over(serve: Callable[[Engine], RolloutServer]) -> None:
    server = serve(Engine())
    server.agents = object()  # type: ignore[assignment]
    for call in (lambda: server.hand_over([1]), lambda: server.copy_partials(1)):
        with pytest.raises(EngineRefused, match="state of tools and users"):
            asyncio.run(call())
