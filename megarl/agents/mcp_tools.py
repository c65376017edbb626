"""Tools of an MCP server (Model Context Protocol), through the protocol's own Python client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from megarl.agents import Answer, Context, Tool, ToolUnavailable
from megarl.agents.toolbox import Failure, Outcome
from megarl.cluster import orphan_reaper
from megarl.recipe.agent import McpServer

CONNECT_SECONDS = 60.0  # until a server that does not answer is given up
LOOK_SECONDS = 10.0  # for a server that may be lost to say what it offers
READ_SECONDS = 300.0  # a server may hold a stream of answers open


class McpTools:
    """A `Caller`: one connection to one server, opened anew where it is lost. Belongs to one event loop."""

    def __init__(self, name: str, server: McpServer) -> None:
        self.name, self.server = name, server
        self._client: Any = None
        self._lost: asyncio.Event | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(server.at_once)  # time counts from when a call has one

    async def tools(self) -> list[Tool]:
        """What the server offers, of that what the recipe asks for.

        Raises:
            ToolUnavailable: the server cannot be reached.
            ValueError: it does not offer a tool that the recipe asks for.
        """
        client = await self._connected()
        found: list[Tool] = []
        cursor = None
        try:
            while True:
                page = await asyncio.wait_for(client.list_tools(cursor=cursor), CONNECT_SECONDS)
                found += [Tool(one.name, one.description or "", one.input_schema, _not_here) for one in page.tools]
                cursor = page.next_cursor
                if cursor is None:
                    break
        except Exception as error:
            raise ToolUnavailable(f"MCP server {self.name!r} does not say what it offers: {_plain(error)}") from error
        offered = {tool.name: tool for tool in found}
        missing = [name for name in self.server.tools if name not in offered]
        if missing:
            raise ValueError(
                f"agent.mcp.{self.name}.tools: the server does not offer {', '.join(missing)}, but {', '.join(offered)}"
            )
        return [offered[name] for name in self.server.tools] if self.server.tools else found

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> Outcome:
        """`context` is not sent: a server is not told the answer."""
        async with self._places:
            client = await self._connected()
            return await self._ask(client, name, arguments, timeout)

    async def _ask(self, client: Any, name: str, arguments: dict[str, Any], timeout: float) -> Outcome:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        began = time.monotonic()

        def outcome(text: str, failure: Failure = "") -> Outcome:
            return Outcome(Answer(text), time.monotonic() - began, failure)

        try:
            result = await asyncio.wait_for(client.call_tool(name, arguments), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            return outcome(f"Error: it was stopped after {timeout:g} seconds", "timeout")
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                return outcome(f"Error: {error}", "error")
            await self._look_whether_it_lives(client)  # over HTTP it may have been this call's stream alone
            raise ToolUnavailable(f"MCP server {self.name!r} has ended the call: {_plain(error)}") from error
        except (ValueError, RuntimeError) as error:  # the client's, of what the server answered to this call
            return outcome(f"Error: {_plain(error)}", "error")
        except Exception as error:
            await self._look_whether_it_lives(client)
            raise ToolUnavailable(f"MCP server {self.name!r} failed: {_plain(error)}") from error
        return outcome(text_of(result), "error" if result.is_error else "")

    async def _look_whether_it_lives(self, client: Any) -> None:
        """Give the connection up where it is lost; other calls are under way on it."""
        if client is not self._client:  # another call has seen to it
            return
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), LOOK_SECONDS)
        except Exception:  # noqa: BLE001 -- it does not live
            if client is self._client:
                self._give_up()

    async def close(self) -> None:
        """End the connection, and the server where we started it."""
        self._give_up()
        if self._keeper is not None:
            await asyncio.wait({self._keeper})  # what failed was told to whoever called

    async def _connected(self) -> Any:
        async with self._opening:
            if self._client is not None and not self._is_lost():
                return self._client
            await self.close()
            opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._lost = asyncio.Event()
            # One task enters and leaves the connection, as its task group asks for.
            self._keeper = asyncio.create_task(self._keep(opened, self._lost))
            try:
                self._client = await asyncio.wait_for(opened, CONNECT_SECONDS)
            except BaseException as error:  # Ctrl-C among them: nobody would end what is being opened
                self._give_up()
                self._keeper.cancel()
                if not isinstance(error, Exception):
                    raise
                silent = isinstance(error, (TimeoutError, asyncio.TimeoutError))
                cause = f"it did not answer within {CONNECT_SECONDS:g} s" if silent else _plain(error)
                raise ToolUnavailable(f"MCP server {self.name!r} cannot be reached: {cause}") from error
            return self._client

    async def _keep(self, opened: asyncio.Future[Any], lost: asyncio.Event) -> None:
        try:
            async with _connection(self.server) as client:
                opened.set_result(client)
                await lost.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                opened.exception()  # it may be that nobody waits any more
            elif isinstance(error, asyncio.CancelledError):
                raise
        finally:
            lost.set()

    def _is_lost(self) -> bool:
        return self._lost is None or self._lost.is_set()

    def _give_up(self) -> None:
        self._client = None
        if self._lost is not None:
            self._lost.set()


def text_of(result: Any) -> str:
    """The text of a CallToolResult; of other content, what it is."""
    parts = [one.text if one.type == "text" else f"[{one.type}, which is not text]" for one in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


@contextlib.asynccontextmanager
async def _connection(server: McpServer) -> AsyncIterator[Any]:
    """A client of `server`, which is started where it is named by a command."""
    import httpx2
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url:
        headers = {name: _variable(variable, "headers") for name, variable in server.headers.items()}
        timeout = httpx2.Timeout(CONNECT_SECONDS, read=READ_SECONDS)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            Client(streamable_http_client(server.url, http_client=http)) as client,
        ):
            yield client
        return
    program, *arguments = server.command
    # With the mark of those that end with us, however we end (cluster/orphan_reaper.py).
    mark = {name: os.environ[name] for name in (orphan_reaper.VARIABLE,) if name in os.environ}
    passed = {name: _variable(name, "pass_env") for name in server.pass_env}
    parameters = StdioServerParameters(command=program, args=arguments, env={**server.env, **passed, **mark})
    # What it says on stderr goes where this process's own descriptor does, whatever sys.stderr is now.
    async with Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)) as client:
        yield client


def _variable(name: str, setting: str) -> str:
    if name not in os.environ:
        raise ValueError(f"{setting} names {name}, which the environment here has not")
    return os.environ[name]


def _plain(error: BaseException) -> str:
    """Of a task group's exceptions the first; some have no text of their own."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return str(error) or type(error).__name__


def _not_here(**_: Any) -> str:
    raise AssertionError("an MCP tool runs at its server")
