"""MCP servers as tools: real servers over stdio and HTTP, timeouts, failures and refusals."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import pytest

from megarl.agents import Context, ToolUnavailable
from megarl.agents.call_formats import ToolCall
from megarl.agents.mcp_tools import McpTools
from megarl.agents.setup import Agents, AgentSetup, check_tools
from megarl.cluster.process import free_port
from megarl.recipe.agent import AgentConfig, McpServer
from megarl.types import Turn
from tests.support.agent_tokenizers import qwen3


def stdio(**more: Any) -> McpServer:
    return McpServer(command=[sys.executable, "-m", "tests.support.mcp_server"], **more)


def test_an_mcp_server_over_stdio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOOD", "fine")

    async def used() -> None:
        server = McpTools("mine", stdio(pass_env=["MOOD"]))
        try:
            offered = await server.tools()
            assert [tool.name for tool in offered] == ["add", "fail", "wait", "mood"]
            assert offered[0].description == "Adds two numbers." and offered[0].parameters["required"] == ["a", "b"]
            context = Context("row", ground_truth="secret")
            assert (await server.call("add", {"a": 2, "b": 3}, context, 20)).answer.text == "5"
            assert (await server.call("mood", {}, context, 20)).answer.text == "fine"
            wrong = await server.call("fail", {"how": "so"}, context, 20)
            assert (wrong.failure, wrong.answer.text) == ("error", "Error executing tool fail")  # the server's words
            # The server ends: the call fails, and the next call starts a new server.
            with pytest.raises(ToolUnavailable, match="'mine'"):
                await server.call("fail", {"how": "exit"}, context, 20)
            assert (await server.call("add", {"a": 2, "b": 4}, context, 20)).answer.text == "6"
            late = await server.call("fail", {"how": "hang"}, context, 0.3)
            assert (late.failure, late.answer.text) == ("timeout", "Error: it was stopped after 0.3 seconds")
        finally:
            await server.close()

    asyncio.run(used())


def test_a_calls_timeout_starts_when_it_is_sent() -> None:
    """A server that serves one call at a time receives one at a time: none times out behind others."""

    async def used() -> list[str]:
        server = McpTools("mine", stdio(at_once=1))
        try:
            calls = [server.call("wait", {"seconds": 0.4}, Context("row"), 1.5) for _ in range(6)]
            return [outcome.failure for outcome in await asyncio.gather(*calls)]
        finally:
            await server.close()

    assert asyncio.run(used()) == [""] * 6


def test_an_mcp_server_that_never_answers_fails_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call returns an error, and nothing else is cancelled."""
    monkeypatch.setattr("megarl.agents.mcp_tools.CONNECT_SECONDS", 0.5)

    async def used() -> None:
        server = McpTools("mine", McpServer(command=[sys.executable, "-c", "import time; time.sleep(60)"]))
        for _ in range(2):
            with pytest.raises(ToolUnavailable, match="MCP server 'mine' cannot be reached"):
                await server.call("add", {}, Context("row"), 5.0)
        await server.close()

    asyncio.run(used())


def test_ctrl_c_does_not_wait_for_a_silent_mcp_server() -> None:
    """A connection being opened ends with the caller, which does not wait for it."""

    async def interrupted() -> None:
        server = McpTools("mine", McpServer(command=[sys.executable, "-c", "import time; time.sleep(300)"]))
        waiting = asyncio.ensure_future(server.tools())
        await asyncio.sleep(0.5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(server.close(), 20)

    began = time.monotonic()
    asyncio.run(interrupted())
    assert time.monotonic() - began < 25


def test_an_invalid_call_does_not_fail_concurrent_calls() -> None:
    """Samples share a connection; an invalid call fails only its sample."""

    async def used() -> list[Any]:
        server = McpTools("mine", stdio())
        try:
            calls = [
                server.call("wait", {"seconds": 0.5}, Context("row"), 20.0),
                server.call("add", {"a": "x", "b": 1}, Context("row"), 20.0),
                server.call("no_such_tool", {}, Context("row"), 20.0),
            ]
            first = await asyncio.gather(*calls)
            client = server._client
            again = await server.call("add", {"a": 1, "b": 1}, Context("row"), 20.0)
            assert server._client is client, "the connection was opened again"
            return [*first, again]
        finally:
            await server.close()

    waited, wrong, absent, right = asyncio.run(used())
    assert (waited.answer.text, waited.failure) == ("waited", "") and right.answer.text == "2"
    assert wrong.failure == absent.failure == "error"


def test_an_mcp_server_over_http() -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.support.mcp_server", str(port)], stderr=subprocess.DEVNULL)
    try:
        setup = AgentSetup(
            AgentConfig(mcp={"far": McpServer(url=f"http://127.0.0.1:{port}/mcp", tools=["add"])}), {}, {}
        )
        for _ in range(100):
            try:
                (schema,) = check_tools(setup, qwen3())
                break
            except ValueError:  # it is not listening yet
                time.sleep(0.2)
        assert schema["function"]["name"] == "add"

        async def used() -> Turn:
            agents = Agents(setup, qwen3())
            try:
                loop = await agents.start()
                return (await loop.tools.call(ToolCall("add", {"a": 20, "b": 22}), Context("row"), 20.0)).turn
            finally:
                await agents.close()

        assert asyncio.run(used()).text == "42"
    finally:
        process.terminate()
        process.wait()


def test_an_unreachable_or_incomplete_mcp_server_is_refused() -> None:
    for server in (McpServer(command=["/no/such/program"]), McpServer(url=f"http://127.0.0.1:{free_port()}/mcp")):
        with pytest.raises(ValueError, match=r"(?s)agent\.mcp\b.*MCP server 'mine' cannot be reached"):
            check_tools(AgentSetup(AgentConfig(mcp={"mine": server}), {}, {}), qwen3())
    with pytest.raises(ValueError, match="pass_env names NO_SUCH_VARIABLE, which the environment here has not"):
        check_tools(AgentSetup(AgentConfig(mcp={"mine": stdio(pass_env=["NO_SUCH_VARIABLE"])}), {}, {}), qwen3())
    with pytest.raises(ValueError, match="the server does not offer sub, but add, fail, wait, mood"):
        check_tools(AgentSetup(AgentConfig(mcp={"mine": stdio(tools=["sub"])}), {}, {}), qwen3())


def test_duplicate_tool_names_are_refused() -> None:
    setup = AgentSetup(AgentConfig(tools=["tests.support.agent_tools:add"], mcp={"mine": stdio()}), {}, {})
    with pytest.raises(ValueError, match=r"agent.mcp.mine and agent.tools both have a tool 'add'"):
        check_tools(setup, qwen3())
