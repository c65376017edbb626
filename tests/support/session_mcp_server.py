"""An MCP server over HTTP with sessions (protocol 2025-06-18); a test chooses its failures. It runs in threads of the test."""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT = {"name": "wait", "description": "Waits.", "inputSchema": {"type": "object", "properties": {}}}
INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "s", "version": "1"},
}


class SessionServer(ThreadingHTTPServer):
    """`status`: answers each POST with it instead. `hangs`: methods that are never answered. `together`: calls that are answered
    when that many calls run. `cursors`: of the pages of the list of tools. `streams`: answers calls with a stream of events."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sessions: set[str] = set()
        self.status, self.hangs = 0, ""
        self.running, self.together, self.changed = 0, 1, threading.Condition()
        self.cursors: Iterator[str | None] = itertools.repeat(None)
        self.streams = False
        self.ended = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/mcp"

    def handle_error(self, *_: Any) -> None:
        """Print nothing: clients leave."""

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.shutdown()
        self.socket.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SessionServer

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._send(405)

    def do_DELETE(self) -> None:
        self._hang("DELETE")
        self._send(200)

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method = request["method"]
        self._hang(method)
        if server.status:
            self._send(server.status)
        elif method == "initialize":
            session = uuid.uuid4().hex
            server.sessions.add(session)
            self._send(200, request, INITIALIZED, session)
        elif self.headers.get("mcp-session-id") not in server.sessions:
            self._send(404 if self.headers.get("mcp-session-id") else 400)
        elif "id" not in request:
            self._send(202)
        elif method == "tools/list":
            self._send(200, request, {"tools": [WAIT], "nextCursor": next(server.cursors)})
        else:
            self._call(request)

    def _call(self, request: dict[str, Any]) -> None:
        server, arguments = self.server, request["params"]["arguments"]
        self._hang(arguments.get("hang", ""))
        time.sleep(arguments.get("seconds", 0))
        with server.changed:
            server.running += 1
            server.changed.notify_all()
            came = server.changed.wait_for(lambda: server.running >= server.together, 10)
        text = "waited" + "." * arguments.get("dots", 0) if came else "the other calls did not come"
        result = {"content": [{"type": "text", "text": text}], "isError": False}
        self._send(200, request, result, streams=server.streams, defect=arguments.get("defect", ""))

    def _hang(self, method: str) -> None:
        if method and method == self.server.hangs:
            self.server.ended.wait()

    def _send(
        self,
        status: int,
        request: Any = None,
        result: Any = None,
        session: str = "",
        streams: bool = False,
        defect: str = "",
    ) -> None:
        body = b"" if result is None else json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()
        if streams:
            body = b"event: message\ndata: " + body + b"\n\n"
        self.send_response(status)
        self.send_header("content-length", str(len(body) + (defect == "breaks off")))
        if body:
            self.send_header("content-type", "text/event-stream" if streams else "application/json")
        if defect == "not gzip":
            self.send_header("content-encoding", "gzip")
        if session:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection |= bool(defect)
