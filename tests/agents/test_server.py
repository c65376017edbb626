"""A rollout process with an agent loop: samples of a group progress separately, groups return whole, failures are named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.agents.setup import AgentSetup
from megarl.cluster import outages
from megarl.cluster.failures import CallFailed
from megarl.cluster.process import free_port
from megarl.engines.base import EngineDead
from megarl.engines.tape import requests_event
from megarl.recipe.agent import AgentConfig, McpServer
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards import Scorer
from megarl.rewards.weighted import Term
from megarl.rollout import server as module
from megarl.rollout.server import RolloutServer
from megarl.types import Completion, GenerationRequest, Group, Prompt, SampleTokens, Sampling
from tests.support.agent_task import write_verls_tool
from tests.support.collecting import CollectedGroups

ASK = '<tool_call>{"name": "look-up", "arguments": {"key": "b"}}</tool_call>'
SETUP = AgentSetup(
    AgentConfig(
        tools=[
            "tests.support.agent_tools:look_up",
            "tests.support.agent_tools:wait",
            "tests.support.agent_tools:misbehave",
        ],
        processes=2,
        retries=0,
        attempts=1,
    ),
    {},
    {},
)


class Engine:
    """Answer `policy` of (turn, seed); a call returns all its samples together, as an engine does."""

    def __init__(self, policy: Callable[[int, int], str]) -> None:
        self.policy, self.requests = policy, list[GenerationRequest]()
        self.encode: Callable[[str], list[int]] = lambda text: []
        self.lock = threading.Lock()

    def start(self, group_rank: None) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        return None

    def generate(self, requests: list[GenerationRequest], finished: Callable[[int, list[Completion]], None]) -> None:
        with self.lock:
            self.requests += requests
        for request in requests:
            turn = 0 if len(request.prompt.tokens) == 2 else 1
            ids = np.array([*self.encode(self.policy(turn, request.seed)), 2], np.int32)
            finished(request.group, [Completion(ids, np.full(len(ids), -0.5, np.float32), "stop")])


@pytest.fixture
def serve(quickstart_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RolloutServer]]:
    def make_server(engine: Engine, setup: AgentSetup = SETUP) -> RolloutServer:
        monkeypatch.setattr(module.engines, "create", lambda name, spec: engine)
        server = RolloutServer(
            "fake", None, str(quickstart_data / "model"), RewardConfig(), [], SandboxConfig(), agent=setup
        )  # type: ignore[arg-type]
        engine.encode = server.tokenizer.encode
        score = Scorer("mine", lambda request: float(request.turns[-1].text == "7"), in_process=True)
        server.scoring.terms = {"test": (Term(score),)}
        return server

    yield make_server


def request(group: int, count: int = 2, **more: Any) -> GenerationRequest:
    prompt = Prompt(f"row/{group}", (5, 6), "?", "test", "7", {"table": {"b": 7}})
    return GenerationRequest(group, prompt, Sampling(n=count, max_tokens=300), seed=100 * group, **more)


def run(server: RolloutServer, requests: list[GenerationRequest]) -> list[tuple[Group, list[SampleTokens]]]:
    async def everything() -> list[tuple[Group, list[SampleTokens]]]:
        await server.start()
        try:
            submitted = asyncio.ensure_future(server.submit(requests))
            finished = CollectedGroups(server)
            groups = await asyncio.gather(*(finished.collect(item.group) for item in requests))
            await submitted
            return groups
        finally:
            await server.shutdown()

    return asyncio.run(everything())


def test_groups_of_two_turns(serve: Callable[..., RolloutServer]) -> None:
    """Samples with even seeds call the tool and are right; those with odd seeds guess at once."""
    engine = Engine(lambda turn, seed: ("7" if turn else ASK) if seed % 2 == 0 or turn else "3")
    server = serve(engine)
    groups = run(server, [request(3, with_greedy=True), request(4)])
    for number, (group, vectors) in zip((3, 4), groups, strict=True):
        assert group.number == number and [sample.reward for sample in group.samples] == [1.0, 0.0]
        assert [sample.tool_use.turns for sample in group.samples if sample.tool_use] == [2, 1]
        assert [len(sample.turns) for sample in vectors] == [3, 1]
        for sample, vector in zip(group.samples, vectors, strict=True):
            assert sample.length == len(vector.tokens) and sample.loss_tokens == vector.loss_mask.sum()
        assert vectors[0].turns[1].text == "7" and "7" in vectors[0].text and "look-up" in vectors[0].text
    greedy = groups[0][0].greedy
    assert greedy is not None and greedy.reward == 1.0 and groups[1][0].greedy is None
    # First turns are one message to the engine, each sample a request with the seed that it has within its group.
    first = [(item.seed, item.sampling.n, item.sampling.temperature) for item in engine.requests[:5]]
    assert first == [(300, 1, 1.0), (301, 1, 1.0), (300, 1, 0.0), (400, 1, 1.0), (401, 1, 1.0)]
    assert (
        len(engine.requests) == 8 and len({item.seed for item in engine.requests[5:]}) == 2
    )  # the greedy one shares its sibling's


def test_requests_of_two_samples_are_different_events(serve: Callable[..., RolloutServer]) -> None:
    """Without seeds, equal prompts and equal turns make equal requests: a replay needs the sample's number."""
    engine = Engine(lambda turn, seed: "7" if turn else ASK)
    prompt = request(3).prompt
    waves = [[GenerationRequest(group, prompt, Sampling(2, 300), None, with_greedy=True)] for group in (3, 4)]
    for wave in waves:
        run(serve(engine), wave)
    assert len(engine.requests) == 2 * (3 + 3)
    first = [requests_event([item]) for item in engine.requests if len(item.prompt.tokens) == 2]
    second = [requests_event([item]) for item in engine.requests if len(item.prompt.tokens) > 2]
    assert len(set(first)) == len(set(second)) == 6
    numbers = [item.group for item in engine.requests]
    assert {number: numbers.count(number) for number in numbers} == dict.fromkeys((9, 10, 11, 12, 13, 14), 2)


def test_a_slow_tool_does_not_delay_other_groups(serve: Callable[..., RolloutServer]) -> None:
    slow = '<tool_call>{"name": "wait", "arguments": {"seconds": 1.5}}</tool_call>'
    server = serve(Engine(lambda turn, seed: "7" if turn else (slow if seed == 100 else ASK)))

    async def order() -> list[int]:
        await server.start()
        try:
            finished: list[int] = []

            await server.submit([request(1), request(2), request(3)])
            while len(finished) < 3:
                finished += [number for number, _ in (await server.collect(3))[0]]
            return finished
        finally:
            await server.shutdown()

    assert asyncio.run(order())[-1] == 1


def test_an_unavailable_tool_fails_only_its_group(serve: Callable[..., RolloutServer]) -> None:
    absent = '<tool_call>{"name": "misbehave", "arguments": {"how": "absent"}}</tool_call>'
    server = serve(Engine(lambda turn, seed: "7" if turn else (absent if seed == 101 else ASK)))
    (bad, _), (good, _) = run(server, [request(1), request(2)])
    (failure,) = bad.failures
    assert str(failure) == "tool 'misbehave' failed on row 'row/1': the index is being rebuilt"
    assert not good.failures and [sample.reward for sample in good.samples] == [1.0, 1.0]


def test_an_engine_death_in_a_later_turn_fails_all_groups_of_the_message(serve: Callable[..., RolloutServer]) -> None:
    def policy(turn: int, seed: int) -> str:
        if turn:
            raise EngineDead("engine 'fake' died")
        return ASK

    server = serve(Engine(policy))

    async def submit() -> list[object]:
        await server.start()
        try:
            submitted = server.submit([request(1), request(2)])
            collected = map(CollectedGroups(server).collect, (1, 2))
            return await asyncio.gather(submitted, *collected, return_exceptions=True)
        finally:
            await server.shutdown()

    outcomes = asyncio.run(submit())
    assert isinstance(outcomes[0], EngineDead)
    causes = [outcome.failure.cause for outcome in outcomes[1:] if isinstance(outcome, CallFailed)]
    assert len(causes) == 2 and all(cause.startswith(("EngineDead:", "CancelledError:")) for cause in causes)


# ---- tools with state

TWICE = 2 * '<tool_call>{"name": "find_digit", "arguments": {"key": "b"}}</tool_call>'


def with_state(folder: Path) -> tuple[AgentSetup, GenerationRequest]:
    """Settings with a tool of verl, and a request with its arguments."""
    config = AgentConfig(tools=[str(write_verls_tool(folder))], processes=2, retries=0)
    kwargs = {"find_digit": {"create_kwargs": {"table": {"b": 7}}}}
    prompt = Prompt("row/3", (5, 6), "?", "test", "7", {"tools_kwargs": kwargs})
    return AgentSetup(config, {}, {}), GenerationRequest(3, prompt, Sampling(n=4, max_tokens=300), seed=300)


def events(folder: Path, event: str) -> list[str]:
    lines = (folder / "digits").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if line.startswith(event))


def test_a_tool_of_verl_keeps_its_state_within_a_sample(serve: Callable[..., RolloutServer], tmp_path: Path) -> None:
    """Its rewards depend on the sample's earlier calls, and are part of the reward of that sample alone."""
    setup, request = with_state(tmp_path)
    server = serve(Engine(lambda turn, seed: TWICE if not turn and seed % 2 == 0 else "7"), setup)
    ((group, vectors),) = run(server, [request])
    assert [sample.reward for sample in group.samples] == [1.1875, 1.0, 1.1875, 1.0]
    for sample, vector in zip(group.samples, vectors, strict=True):
        if sample.reward == 1.0:
            assert not sample.steps
            continue
        assert [turn.reward for turn in vector.turns] == [0.0, 0.25, -0.125, 1 / 16]
        assert [reward for _, reward in sample.steps] == [0.125, 1 / 16]
        assert sample.steps[-1][0] == sample.length - 1
    assert events(tmp_path, "create") == events(tmp_path, "release") == ["15", "17"]


def test_tools_of_aborted_samples_are_released(serve: Callable[..., RolloutServer], tmp_path: Path) -> None:
    """The engine fails while samples wait for their second turn."""

    def policy(turn: int, seed: int) -> str:
        if turn:
            raise EngineDead("no memory")
        return TWICE

    setup, request = with_state(tmp_path)
    with pytest.raises(CallFailed, match="EngineDead: no memory"):
        run(serve(Engine(policy), setup), [request])
    assert events(tmp_path, "create") and events(tmp_path, "create") == events(tmp_path, "release")


# ---- tools that are down


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def run_through(
    server: RolloutServer, requests: list[GenerationRequest], meanwhile: Awaitable[Any]
) -> list[Group]:
    """Run `requests` with the server, and `meanwhile`."""
    submitted = asyncio.ensure_future(server.submit(requests))
    finished = CollectedGroups(server)
    groups = asyncio.gather(*(finished.collect(item.group) for item in requests))
    await meanwhile
    await submitted
    return [group for group, _ in await groups]


def test_samples_wait_for_an_mcp_server_that_is_killed_and_started_again(
    serve: Callable[..., RolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls fail without a connection. No sample is lost, even the only one of its row."""
    monkeypatch.setattr(outages, "FIRST_WAIT", 0.1)
    port = free_port()
    far = McpServer(url=f"http://127.0.0.1:{port}/mcp?key=s3cr3t")
    setup = AgentSetup(AgentConfig(mcp={"far": far}, retries=0, attempts=1), {}, {})
    server = serve(Engine(lambda turn, seed: "7" if turn else call("add", a=3, b=4)), setup)
    process = mcp_server(port)

    async def everything() -> tuple[list[Group], list[Any]]:
        nonlocal process
        await server.start()
        try:
            before = await run_through(server, [request(1)], asyncio.sleep(0))
            process.kill()
            process.wait()
            reports = []

            async def restart() -> None:
                nonlocal process
                seen, down = await server.outages(0)
                process = await asyncio.to_thread(mcp_server, port)
                reports.extend([*down, *(await server.outages(seen))[1]])

            first = await run_through(server, [request(2, count=1)], restart())
            return [*before, *first, *(await run_through(server, [request(3)], asyncio.sleep(0)))], reports
        finally:
            await server.shutdown()

    try:
        groups, (outage,) = asyncio.run(asyncio.wait_for(everything(), 60))
    finally:
        process.kill()
    assert outage.service == f"MCP server 'far' (http://127.0.0.1:{port}/mcp)" and outage.cause
    assert all(not group.failures and not group.sampled_again for group in groups)
    assert [sample.reward for group in groups for sample in group.samples] == [1.0] * 5


def mcp_server(port: int) -> subprocess.Popen[bytes]:
    """Start the tests' MCP server, and wait until it listens."""
    process = subprocess.Popen([sys.executable, "-m", "tests.support.mcp_server", str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return process
        time.sleep(0.05)
    raise AssertionError("the MCP server does not listen")


def test_samples_wait_for_a_tool_that_fails_for_several_rows(
    serve: Callable[..., RolloutServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outages, "FIRST_WAIT", 0.2)
    index = tmp_path / "index"
    server = serve(
        Engine(lambda turn, seed: "7" if turn else call("search", index=str(index))), with_search(attempts=1)
    )

    async def everything() -> tuple[list[Group], Any]:
        await server.start()
        try:
            down: list[Any] = []

            async def repair() -> None:
                down.extend((await server.outages(0))[1])
                await asyncio.sleep(2.0)
                index.write_text("7")

            return await run_through(server, [request(1), request(2)], repair()), down
        finally:
            await server.shutdown()

    groups, (outage,) = asyncio.run(asyncio.wait_for(everything(), 60))
    assert (outage.service, outage.cause) == ("tool 'search'", "there is no index")
    assert [sample.reward for group in groups for sample in group.samples] == [1.0] * 4
    assert all(not group.failures and not group.sampled_again for group in groups)


def test_a_tool_with_a_mistake_is_not_down(
    serve: Callable[..., RolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are invalid for every row. No sample waits, and all groups fail."""
    monkeypatch.setattr(outages, "FIRST_WAIT", 0.05)
    setup = AgentSetup(AgentConfig(tools=["tests.support.agent_tools:odd"], retries=1, attempts=2), {}, {})
    server = serve(Engine(lambda turn, seed: "7" if turn else call("odd", kind="nan")), setup)
    groups = run(server, [request(number) for number in range(1, 4)])
    for group, _ in groups:
        assert [(failure.kind, failure.attempts) for failure in group.failures] == [("error", 4)] * 2
        assert group.sampled_again == {"error": 2}


@pytest.mark.parametrize("attempts", [1, 2, 9])
def test_a_sample_is_sampled_again_before_its_group_fails(
    serve: Callable[..., RolloutServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: int
) -> None:
    """A tool fails for one row alone: its samples start again with their seeds until the tool works or their attempts end."""
    monkeypatch.setattr(outages, "FIRST_WAIT", 0.05)
    index = tmp_path / "index"
    engine = Engine(lambda turn, seed: "7" if turn else call("search", index=str(index)) if seed == 100 else ASK)
    monkeypatch.setattr(
        "megarl.agents.trajectory.wait_before", lambda number: index.write_text("7") * 0.0 if number else 0.0
    )
    ((group, vectors),) = run(serve(engine, with_search(attempts=attempts)), [request(1)])
    first_turns = [item for item in engine.requests if len(item.prompt.tokens) == 2]
    assert [item.seed for item in first_turns] == [100, 101, *[100] * min(attempts - 1, 2)]
    assert len({item.group for item in first_turns}) == 2
    if attempts < 3:
        (failure,) = group.failures
        assert (failure.kind, failure.attempts) == ("unavailable", attempts) and "there is no index" in str(failure)
        assert group.sampled_again == ({"unavailable": 1} if attempts == 2 else {})
    else:
        assert not group.failures and group.sampled_again == {"unavailable": 2}
        assert [sample.reward for sample in group.samples] == [1.0, 1.0]
        assert len(vectors[0].turns) == 3, "nothing is left of the samples that failed"


def with_search(attempts: int) -> AgentSetup:
    tools = ["tests.support.agent_tools:search", "tests.support.agent_tools:look_up"]
    return AgentSetup(AgentConfig(tools=tools, processes=2, retries=0, attempts=attempts), {}, {})
