"""Failures of HTTP at an MCP server: none of them is an answer for the policy, and none ends other calls."""

from __future__ import annotations

import asyncio
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
        with pytest.raises(ToolUnavailable, match="'mine' did not take the call: HTTP status 404"):
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


@pytest.mark.parametrize("status", [401, 429, 502, 503])
def test_a_refusal_of_a_gateway_is_an_outage(server: SessionServer, status: int) -> None:
    async def body(tools: McpTools) -> str:
        await call(tools)
        server.status, client = status, tools._client
        with pytest.raises(ToolUnavailable, match=f"'mine' did not take the call: HTTP status {status}"):
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


def test_a_list_of_tools_that_never_ends_is_refused(server: SessionServer) -> None:
    server.next_cursor = "more"

    async def body(tools: McpTools) -> None:
        with pytest.raises(ToolUnavailable, match="the list does not end: the cursor 'more' came twice"):
            await asyncio.wait_for(tools.tools(), 20)

    used(server, body)
