"""A rollout process serves a second controller after the first has died: loaded, idle, and without results of the first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.engines.base import EngineDead, GenerationAborted, GroupRank
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rollout import server as module
from megarl.rollout.kept.server import KeptRolloutServer
from megarl.types import Completion, GenerationRequest
from tests.rollout.test_server import requests, score_with
from tests.support.collecting import CollectedGroups


class BusyEngine:
    """Finishes the first group of a call, and keeps the others until `abort`. `finishes`: whether it finishes all."""

    def __init__(self) -> None:
        self.starts, self.aborts, self.finishes = 0, 0, False
        self.dead: str | None = None
        self.aborted, self.ended = threading.Event(), threading.Event()

    def start(self, group_rank: GroupRank | None) -> dict[str, Any]:
        self.starts += 1
        return {"version": "1"}

    def generate(self, wave: list[GenerationRequest], finished: Callable[[int, list[Completion]], None]) -> None:
        done = wave if self.finishes else wave[:1]
        for request in done:
            sample = Completion(np.full(3, 7, np.int32), np.zeros(3, np.float32), "stop")
            finished(request.group, [sample] * (request.sampling.n + request.with_greedy))
        if not self.finishes:
            assert self.aborted.wait(30)
            raise GenerationAborted("aborted")

    def abort(self) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)
        self.aborts += 1
        self.aborted.set()

    def watch(self) -> None:
        self.ended.wait()


@pytest.fixture
def engine() -> BusyEngine:
    return BusyEngine()


@pytest.fixture
def server(engine: BusyEngine, quickstart_data: Path, monkeypatch: pytest.MonkeyPatch) -> KeptRolloutServer:
    monkeypatch.setattr(module.engines, "create", lambda name, spec: engine)
    made = KeptRolloutServer("fake", None, str(quickstart_data / "model"), RewardConfig(), [], SandboxConfig())
    score_with(made, lambda request: 1.0)
    return made


def test_requests_of_a_dead_controller_end(engine: BusyEngine, server: KeptRolloutServer) -> None:
    """A call receives the errors of the groups that run, and another waits until the release ends it."""
    wave = requests(with_greedy=False)

    async def live() -> None:
        assert await server.start() == {"version": "1"}
        submitted = asyncio.create_task(server.submit(wave))
        ((number, _),), _ = await server.collect(8)
        assert number == wave[0].group
        waiting = [asyncio.create_task(server.collect(8)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(server.release(), 10) is True
        outcomes = await asyncio.gather(submitted, *waiting, return_exceptions=True)
        assert [type(each) for each in outcomes] == [GenerationAborted, tuple, GenerationAborted]
        assert [(number, error.type) for number, error in outcomes[1][0]] == [
            (request.group, "GenerationAborted") for request in wave[1:]
        ]
        assert await server.start() == {"version": "1"} and engine.starts == 1
        assert not server._finished and not server._unsettled and not server._settling
        engine.finishes = True  # the same numbers of groups again
        await server.submit(wave)
        finished = CollectedGroups(server)
        for request in wave:
            group, tokens = await finished.collect(request.group)
            assert group.number == request.group and len(tokens) == 2

    asyncio.run(live())


def test_an_engine_that_cannot_go_on(engine: BusyEngine, server: KeptRolloutServer) -> None:
    async def live() -> None:
        assert await server.release() is False, "it is not loaded"
        await server.start()
        engine.dead = "its update has failed"
        assert await server.release() is False
        engine.dead = None
        assert await server.release() is True
        server._in_group = True
        assert await server.release() is False, "its group steps together"

    asyncio.run(live())


def test_watches_of_all_controllers_share_a_thread(engine: BusyEngine, server: KeptRolloutServer) -> None:
    async def live() -> None:
        before = threading.active_count()
        watches = [asyncio.create_task(server.watch()) for _ in range(40)]
        await asyncio.sleep(0.1)
        assert threading.active_count() <= before + 1
        watches[0].cancel()
        engine.ended.set()
        await asyncio.gather(*watches[1:])

    asyncio.run(live())
