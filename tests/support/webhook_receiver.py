"""A webhook that records the messages it receives."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

TOKEN = "T0KEN-s3cr3t-b7f1"  # in the URL


class Receiver(ThreadingHTTPServer):
    """Records each message, then answers with the next of `answers`, or with 200 and `ok`. Use it as a context manager."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[dict[str, Any]] = []
        self.answers: list[tuple[int, str]] = []  # status and body
        self.headers: dict[str, str] = {}  # of the answers
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook/{TOKEN}?access_token={TOKEN}"

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]

    def wait_for(self, count: int) -> None:
        """Return when `count` messages have arrived."""
        deadline = time.monotonic() + 20
        while len(self.messages) < count:
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.01)

    def __enter__(self) -> Receiver:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert TOKEN in self.path
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(self.server.delay)
        self.server.messages.append(body)
        status, answer = self.server.answers.pop(0) if self.server.answers else (200, "ok")
        self.send_response(status)
        for name, value in {"content-length": str(len(answer.encode())), **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass
