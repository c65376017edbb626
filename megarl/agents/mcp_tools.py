"""Tools of an MCP server (Model Context Protocol), through its Python client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from megarl.agents import Answer, Context, Tool, ToolUnavailable
from megarl.agents.toolbox import CallOutcome, Failure
from megarl.cluster import orphan_reaper
from megarl.cluster.call_gate import url_without_secrets
from megarl.data.image_files import decode, encoded_image
from megarl.errors import pluralize
from megarl.recipe.agent import McpServer

CONNECT_SECONDS = 60.0  # for a server to answer the first request, and to list all its tools
LOOK_SECONDS = 10.0  # for a server to list its tools, when the connection may be lost
CLOSE_SECONDS = 15.0  # for a connection to end, and once more after it is cancelled


class McpTools:
    """A `Caller` with one connection to one server, opened again after a loss. Belongs to one event loop."""

    def __init__(self, name: str, server: McpServer, *, reads_images: bool = False) -> None:
        """`reads_images`: of the model; otherwise a note takes the place of an image."""
        self.name, self.server, self._reads_images = name, server, reads_images
        self.service = f"MCP server {name!r}" + (f" ({url_without_secrets(server.url)})" if server.url else "")
        self._client: Any = None
        self._lost: asyncio.Event | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(server.at_once)  # a call's time-out starts when it has a place

    async def tools(self) -> list[Tool]:
        """List the server's tools; only the ones that the recipe names, if it names any.

        Raises:
            ToolUnavailable: the server cannot be reached.
            ValueError: the server lacks a tool that the recipe names.
        """
        client = await self._connected()
        try:
            listed = await self._listed(client)
        except Exception as error:
            raise ToolUnavailable(f"MCP server {self.name!r} does not list its tools: {_plain(error)}") from error
        offered = {tool.name: tool for tool in listed}
        missing = [name for name in self.server.tools if name not in offered]
        if missing:
            raise ValueError(
                f"agent.mcp.{self.name}.tools: the server does not offer {', '.join(missing)}, but {', '.join(offered)}"
            )
        return [offered[name] for name in self.server.tools] if self.server.tools else listed

    async def _listed(self, client: Any) -> list[Tool]:
        from megarl.agents.mcp_http import reporting

        listed: list[Tool] = []
        cursor, seen = None, set()
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            with reporting(CONNECT_SECONDS) as report:
                try:
                    page = await asyncio.wait_for(client.list_tools(cursor=cursor), deadline - time.monotonic())
                except (TimeoutError, asyncio.TimeoutError) as error:
                    arrived = pluralize(len(listed), "tool")
                    raise ValueError(f"the list is not complete after {CONNECT_SECONDS:g} s, with {arrived}") from error
                except Exception as error:
                    if report.lost and client is self._client:
                        self._give_up()
                    if report.problem:
                        raise RuntimeError(report.problem) from error
                    raise
            listed += [Tool(tool.name, tool.description or "", tool.input_schema, _not_here) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return listed
            if cursor in seen:
                raise ValueError(f"the list does not end: the cursor {cursor!r} came twice")
            seen.add(cursor)

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> CallOutcome:
        """Call a tool. `context` is not sent: a server must not see the answer."""
        async with self._places:
            client = await self._connected()
            return await self._ask(client, name, arguments, timeout)

    async def _ask(self, client: Any, name: str, arguments: dict[str, Any], timeout: float) -> CallOutcome:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, METHOD_NOT_FOUND

        from megarl.agents.mcp_http import reporting

        began = time.monotonic()

        def outcome(text: str, failure: Failure = "", images: tuple[bytes, ...] = ()) -> CallOutcome:
            return CallOutcome(Answer(text, images=images), time.monotonic() - began, failure)

        try:
            with reporting(timeout) as report:
                result = await asyncio.wait_for(client.call_tool(name, arguments), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            return outcome(f"Error: it was stopped after {timeout:g} seconds", "timeout")
        except MCPError as error:
            if report.problem and error.code != METHOD_NOT_FOUND:
                if report.lost and client is self._client:
                    self._give_up()  # the server has started again: the next call opens a new session
                raise ToolUnavailable(f"no answer of MCP server {self.name!r} arrived: {report.problem}") from error
            if error.code != CONNECTION_CLOSED:
                return outcome(f"Error: {error}", "error")
            await self._check_connection(client)  # over HTTP, perhaps only this call's stream is closed
            raise ToolUnavailable(f"MCP server {self.name!r} has ended the call: {_plain(error)}") from error
        except (ValueError, RuntimeError) as error:  # raised by the client for this call's result
            return outcome(f"Error: {_plain(error)}", "error")
        except Exception as error:
            await self._check_connection(client)
            raise ToolUnavailable(f"MCP server {self.name!r} failed: {_plain(error)}") from error
        pictures = await asyncio.to_thread(_readable_images, result) if self._reads_images else {}
        left = [part for number, part in enumerate(result.content) if number not in pictures]
        text = text_of(left, result.structured_content if not pictures else None)
        return outcome(text, "error" if result.is_error else "", tuple(pictures.values()))

    async def _check_connection(self, client: Any) -> None:
        """Give up the connection if the server no longer answers; other calls may use it."""
        if client is not self._client:  # another call replaced it
            return
        from megarl.agents.mcp_http import reporting

        try:
            with reporting(LOOK_SECONDS):
                await asyncio.wait_for(client.list_tools(cache_mode="bypass"), LOOK_SECONDS)
        except Exception:  # noqa: BLE001 -- any failure means a lost connection
            if client is self._client:
                self._give_up()

    async def close(self) -> None:
        """Close the connection, and end a server that we started."""
        self._give_up()
        if self._keeper is not None:  # its failure was raised by the call that opened it
            _, running = await asyncio.wait({self._keeper}, timeout=CLOSE_SECONDS)
            if running:
                self._keeper.cancel()
                await asyncio.wait(running, timeout=CLOSE_SECONDS)

    async def _connected(self) -> Any:
        async with self._opening:
            if self._client is not None and self._lost is not None and not self._lost.is_set():
                return self._client
            await self.close()
            opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._lost = asyncio.Event()
            # The same task must enter and leave the connection (anyio task groups).
            self._keeper = asyncio.create_task(self._keep(opened, self._lost))
            try:
                self._client = await asyncio.wait_for(opened, CONNECT_SECONDS)
            except BaseException as error:  # includes Ctrl-C: the server that is starting must be ended
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
                opened.exception()  # mark as retrieved: the caller may have gone
            elif isinstance(error, asyncio.CancelledError):
                raise
        finally:
            lost.set()

    def _give_up(self) -> None:
        self._client = None
        if self._lost is not None:
            self._lost.set()


def text_of(content: Sequence[Any], structured: Any = None) -> str:
    """Return the text of a result's `content`, with a note in place of other content. `structured`: used without content."""
    parts = [part.text if part.type == "text" else f"[{part.type}, which is not text]" for part in content]
    if not content and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    return "\n".join(parts)


def _readable_images(result: Any) -> dict[int, bytes]:
    """Return the images of a CallToolResult that can be decoded, by their number in its content."""
    images = {}
    for number, part in enumerate(result.content):
        if part.type == "image":
            with contextlib.suppress(ValueError):  # not base64, or no image of a known format: the policy reads a note
                image = base64.b64decode(part.data, validate=True)
                decode(encoded_image(image, "", Path()))
                images[number] = image
    return images


@contextlib.asynccontextmanager
async def _connection(server: McpServer) -> AsyncIterator[Any]:
    """A client of `server`, which is started where it is named by a command."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    from megarl.agents.mcp_http import ANSWER_BYTES, HttpClient

    if server.url:
        headers = {name: _variable(variable, "headers") for name, variable in server.headers.items()}
        async with HttpClient(headers) as http:
            transport = streamable_http_client(server.url, http_client=http, max_sse_event_size=ANSWER_BYTES)
            async with Client(transport) as client:
                yield client
        return
    program, *arguments = server.command
    # Marked, so that the orphan reaper ends it if this process dies (cluster/orphan_reaper.py).
    mark = {name: os.environ[name] for name in (orphan_reaper.VARIABLE,) if name in os.environ}
    passed = {name: _variable(name, "pass_env") for name in server.pass_env}
    parameters = StdioServerParameters(command=program, args=arguments, env={**server.env, **passed, **mark})
    # Its stderr goes to this process's descriptor 2; sys.stderr may be replaced.
    async with Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)) as client:
        yield client


def _variable(name: str, setting: str) -> str:
    if name not in os.environ:
        raise ValueError(f"{setting} names {name}, which the environment here has not")
    return os.environ[name]


def _plain(error: BaseException) -> str:
    """Return the text of an exception, or of the first one in an exception group."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return str(error) or type(error).__name__


def _not_here(**_: Any) -> str:
    raise AssertionError("an MCP tool runs at its server")
