"""Failures of HTTP at an MCP server: none of them is an answer for the policy, and none ends other calls."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from megarl.agents import Context, ToolUnavailable
from megarl.agents.mcp_tools import McpTools
from megarl.agents.toolbox import CallOutcome
from megarl.recipe.agent import McpServer
from tests.support.session_mcp_server import SessionServer


@pytest.fixture
def server() -> Iterator[SessionServer]:
    with SessionServer() as started:
        yield started


def used(server: SessionServer, body: Callable[[McpTools], Awaitable[Any]], *, at_once: int = 16) -> Any:
    async def run() -> Any:
        tools = McpTools("mine", McpServer(url=server.url, at_once=at_once))
        try:
            return await body(tools)
        finally:
            await asyncio.wait_for(tools.close(), 40)

    return asyncio.run(run())


async def call(tools: McpTools, timeout: float = 20.0, **arguments: Any) -> CallOutcome:
    return await tools.call("wait", arguments, Context("row"), timeout)


def test_a_server_that_has_started_again_gets_a_new_session(server: SessionServer) -> None:
    async def body(tools: McpTools) -> str:
        await call(tools)
        server.sessions.clear()
        with pytest.raises(ToolUnavailable, match="no answer of MCP server 'mine' arrived: HTTP status 404"):
            await call(tools)
        return (await call(tools)).answer.text

    assert used(server, body) == "waited"


def test_a_probe_opens_a_new_session_too(server: SessionServer) -> None:
    async def body(tools: McpTools) -> list[str]:
        await call(tools)
        server.sessions.clear()
        with pytest.raises(ToolUnavailable, match="does not list its tools: HTTP status 404"):
            await tools.tools()
        return [tool.name for tool in await tools.tools()]

    assert used(server, body) == ["wait"]


@pytest.mark.parametrize("status", [401, 408, 429, 502, 503, 504])
def test_an_error_of_a_gateway_is_an_outage(server: SessionServer, status: int) -> None:
    async def body(tools: McpTools) -> str:
        await call(tools)
        server.status, client = status, tools._client
        with pytest.raises(ToolUnavailable, match=f"no answer of MCP server 'mine' arrived: HTTP status {status}"):
            await call(tools)
        server.status = 0
        text = (await call(tools)).answer.text
        assert tools._client is client, "the connection was opened again"
        return text

    assert used(server, body) == "waited"


def test_an_error_of_the_server_itself_is_an_answer(server: SessionServer) -> None:
    """A status of 500 may come from the tool, and so from the policy's arguments."""

    async def body(tools: McpTools) -> str:
        await call(tools)
        server.status = 500
        outcome = await call(tools)
        server.status = 0
        return outcome.failure

    assert used(server, body) == "error"


def test_a_call_that_hangs_ends_no_other_call(server: SessionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of a call that has timed out ends soon after it, and alone."""
    monkeypatch.setattr("megarl.agents.mcp_http.GRACE", 0.5)
    server.hangs = "this"

    async def body(tools: McpTools) -> list[CallOutcome]:
        await call(tools)
        client = tools._client
        outcomes = await asyncio.gather(call(tools, 1.0, hang="this"), call(tools, seconds=4))
        assert tools._client is client and not tools._lost.is_set(), "the connection was lost"
        return outcomes

    hung, other = used(server, body)
    assert hung.failure == "timeout" and other.answer.text == "waited"


def test_as_many_calls_run_at_once_as_the_recipe_says(server: SessionServer) -> None:
    async def body(tools: McpTools) -> set[str]:
        await call(tools)
        server.running, server.together = 0, 110
        return {each.answer.text for each in await asyncio.gather(*(call(tools, 30.0) for _ in range(110)))}

    assert used(server, body, at_once=110) == {"waited"}


def test_close_does_not_wait_for_a_server_that_hangs(server: SessionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.agents.mcp_http.GRACE", 0.5)
    server.hangs = "DELETE"

    async def body(tools: McpTools) -> float:
        await call(tools)
        began = time.monotonic()
        await tools.close()
        return time.monotonic() - began

    assert used(server, body) < 15


@pytest.mark.parametrize(
    ("defect", "cause"), [("breaks off", "RemoteProtocolError: peer closed"), ("not gzip", "DecodingError: ")]
)
def test_a_body_that_cannot_be_read_ends_no_other_call(server: SessionServer, defect: str, cause: str) -> None:
    async def body(tools: McpTools) -> str:
        await call(tools)
        client = tools._client
        other = asyncio.create_task(call(tools, seconds=1))
        with pytest.raises(ToolUnavailable, match=f"no answer of MCP server 'mine' arrived: {cause}"):
            await call(tools, defect=defect)
        text = (await other).answer.text
        assert tools._client is client and not tools._lost.is_set(), "the connection was lost"
        return text

    assert used(server, body) == "waited"


def test_a_stream_may_have_an_answer_above_the_clients_default_limit(server: SessionServer) -> None:
    server.streams = True

    async def body(tools: McpTools) -> str:
        return (await call(tools, dots=2 << 20)).answer.text

    assert len(used(server, body)) == (2 << 20) + len("waited")


def test_an_answer_above_the_limit_ends_no_other_call(server: SessionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.agents.mcp_http.ANSWER_BYTES", 10_000)

    async def body(tools: McpTools) -> list[int]:
        lengths = [len((await call(tools, dots=9_000)).answer.text)]
        with pytest.raises(ToolUnavailable, match="ReadError: the answer has more than 10,000 bytes"):
            await call(tools, dots=1 << 20)
        return [*lengths, len((await call(tools, dots=9_000)).answer.text)]

    assert used(server, body) == [9_000 + len("waited")] * 2


@pytest.mark.parametrize(
    ("cursors", "cause"),
    [
        (itertools.repeat("more"), "the list does not end: the cursor 'more' came twice"),
        (map(str, itertools.count()), r"the list is not complete after 1 s, with [1-9][\d,]* tool"),
    ],
)
def test_a_list_of_tools_that_never_ends_is_refused(
    server: SessionServer, monkeypatch: pytest.MonkeyPatch, cursors: Iterator[str], cause: str
) -> None:
    server.cursors = cursors

    async def body(tools: McpTools) -> None:
        await call(tools)
        monkeypatch.setattr("megarl.agents.mcp_tools.CONNECT_SECONDS", 1.0)
        with pytest.raises(ToolUnavailable, match=cause):
            await asyncio.wait_for(tools.tools(), 20)

    used(server, body)
