"""HTTP client of MCP servers that reports HTTP failures to the call that they concern.

mcp's transport ends the whole connection, with all its calls, when one request fails on the way or the body of its answer breaks off.
It answers a request that a gateway refuses with an error like a tool's. A call that runs inside `reporting` gets both as
`HttpReport.problem` instead.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

CONNECT_SECONDS = 60.0
READ_SECONDS = 300.0  # a server may keep a stream open
ANSWER_BYTES = 64 << 20
"""Largest answer. mcp's limit of 1 MiB for streams is too small for images, and it has none for JSON."""
GRACE = 5.0  # for a server to answer a call that was cancelled, and to end a session
_NOT_FOUND = 404
_UNAVAILABLE = (401, 403, 408, 429, 502, 503, 504)
"""Statuses of servers and gateways that do not come from the tool. A status of 500 may."""


@dataclass
class HttpReport:
    """The HTTP side of a call. problem: why no answer arrived, though the tool may have run; "" otherwise. lost: the server does not
    know the session."""

    seconds: float
    problem: str = ""
    lost: bool = False


_report: contextvars.ContextVar[HttpReport | None] = contextvars.ContextVar("http_report", default=None)


@contextlib.contextmanager
def reporting(seconds: float) -> Iterator[HttpReport]:
    """Collect the HTTP failures of a call with a limit of `seconds`. mcp sends a request in the context of its call."""
    report = HttpReport(seconds)
    token = _report.set(report)
    try:
        yield report
    finally:
        _report.reset(token)


class HttpClient(httpx2.AsyncClient):
    """Sends requests of any number of calls; `McpServer.at_once` limits them."""

    def __init__(self, headers: dict[str, str]) -> None:
        # Calls that the server does not end hold their connections for a while: others must not wait for these.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(CONNECT_SECONDS, read=READ_SECONDS)
        super().__init__(headers=headers, timeout=timeout, limits=limits)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        report = _report.get() if request.method == "POST" else None
        if report is not None:
            request.extensions["timeout"]["read"] = report.seconds + GRACE
        elif request.method == "DELETE":
            request.extensions["timeout"].update(dict.fromkeys(("connect", "read", "write"), GRACE))
        try:
            response = await super().send(request, **options)
            if report is not None and response.headers.get("content-type", "").lower().startswith("application/json"):
                response = await _with_body(response)
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            if report is None:
                raise
            report.problem = f"{type(error).__name__}: {error}".rstrip(": ")
            return httpx2.Response(_UNAVAILABLE[-1], request=request)  # fails this call alone
        if report is not None:
            report.lost = response.status_code == _NOT_FOUND and "mcp-session-id" in request.headers
            if report.lost or response.status_code in _UNAVAILABLE:
                report.problem = f"HTTP status {response.status_code} {response.reason_phrase}".rstrip()
        return response


async def _with_body(response: httpx2.Response) -> httpx2.Response:
    """Return the response with its whole body. Raises ReadError for one above ANSWER_BYTES."""
    body = bytearray()
    try:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > ANSWER_BYTES:
                raise httpx2.ReadError(f"the answer has more than {ANSWER_BYTES:,} bytes")
    finally:
        await response.aclose()
    headers = response.headers.copy()
    headers.pop("content-encoding", None)  # the body is decoded
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)
