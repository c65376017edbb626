"""A reward service in its own process: ``python -m tests.support.flaky_service PORT``. Its score is the length of the response.

A response that contains "bad" is answered with 500. A file named after the port, ``fault-PORT`` in the current directory, makes
the service answer every request with the status that the file contains, or hang if it contains "hang".
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        file = fault_file(Path.cwd(), self.server.server_address[1])
        fault = file.read_text() if file.exists() else ""
        if fault == "hang":
            time.sleep(60)
        status = int(fault) if fault else 500 if "bad" in sample["response"] else 200
        body = json.dumps(float(len(sample["response"]))).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


def fault_file(folder: Path, port: int) -> Path:
    return folder / f"fault-{port}"


class FlakyService:
    """The service's process, which a test kills and starts again on the same port."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.url = folder, f"http://127.0.0.1:{self.port}/score"
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__)), str(self.port)]
        self.process = subprocess.Popen(command, cwd=self.folder)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def failing(self, fault: str) -> Iterator[None]:
        """In the block every request is answered with the status `fault`, or not at all ("hang")."""
        file = fault_file(self.folder, self.port)
        file.write_text(fault)
        try:
            yield
        finally:
            file.unlink()


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
