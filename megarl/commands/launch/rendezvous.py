"""How the launchers of one run keep together: every node's tells the head's that it is there, and
waits on that connection for the head to be ready, for all to have joined and, at the end, for the run's exit status.
A node that cannot go on says why.

Messages are lines of JSON; nothing is executed or unpickled. The head gives Ray's token to each rank that
has not called yet, once: where the network between the nodes is not to be trusted with that, set
RAY_AUTH_TOKEN on every node, and none is sent.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any, TextIO


class RollCall:
    """The head's end.

    nodes: how many there are, the head included.
    environment: what the nodes need to join.
    """

    def __init__(self, host: str, port: int, nodes: int, environment: dict[str, str]) -> None:
        self._nodes = nodes
        self._ready = {"ready": True, "environment": environment}
        self._lock = threading.Lock()
        self._present: dict[int, tuple[socket.socket, str]] = {}
        self._failed: dict[int, str] = {}
        self._to_end: set[int] = set()
        self._open = False
        self._listener = socket.create_server((host, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def absent(self) -> list[int]:
        """Ranks of the nodes that have not called, or have left."""
        with self._lock:
            return [rank for rank in range(1, self._nodes) if rank not in self._present]

    def failed(self) -> dict[int, str]:
        """Ranks of the nodes that have given up, with what they say of it."""
        with self._lock:
            return dict(self._failed)

    def to_end(self) -> list[int]:
        """Ranks of the nodes that were told to end, and wait until the run has."""
        with self._lock:
            return sorted(self._to_end)

    def open(self) -> None:
        """Tell the nodes, present and to come, that the head is ready for them."""
        with self._lock:
            self._open = True
        self._tell_all(self._ready)

    def begin(self) -> None:
        """Tell the nodes that all are there."""
        self._tell_all({"begun": True})

    def _tell_all(self, message: dict[str, Any]) -> None:
        with self._lock:
            for connection, _ in self._present.values():
                _send(connection, message)

    def finish(self, status: int) -> None:
        """Tell the nodes the run's exit status, and hang up."""
        with self._lock:
            self._listener.close()
            for connection, _ in self._present.values():
                _send(connection, {"status": status})
                _hang_up(connection)
            self._present = {}

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed by `finish`
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("r", encoding="utf-8") as lines:
            self._serve_node(connection, lines)

    def _serve_node(self, connection: socket.socket, lines: TextIO) -> None:
        hello = _receive(lines)
        rank = hello.get("node_rank") if hello else None
        refusal = self._admit(connection, hello) if hello and isinstance(rank, int) else "no node of this run"
        if refusal:
            _send(connection, {"refused": refusal})
            connection.close()
            return
        assert isinstance(rank, int)
        while (message := _receive(lines)) is not None:  # None: it has hung up
            with self._lock:
                if "failed" in message:
                    self._failed[rank] = str(message["failed"])
                if "to_end" in message:
                    self._to_end.add(rank)
        with self._lock:
            if self._present.get(rank, (None, ""))[0] is connection:
                del self._present[rank]

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> str | None:
        rank, host = hello["node_rank"], str(hello.get("host"))
        with self._lock:
            if hello.get("nodes") != self._nodes:
                return f"the head counts {self._nodes} nodes, this one {hello.get('nodes')}"
            if rank in self._present:
                return f"node rank {rank} is taken by {self._present[rank][1]}"
            if not 0 < rank < self._nodes:
                return f"node rank {rank} is not one of 1 to {self._nodes - 1}"
            self._present[rank] = connection, host
            if self._open:
                _send(connection, self._ready)
        return None


class Attendance:
    """Another node's end. `refusal`, `ready`, `begun`, `status` become known in time; so does `left`, the head's going."""

    def __init__(self, host: str, port: int, node_rank: int, nodes: int, timeout: float) -> None:
        """Raises TimeoutError where the head is not reached within `timeout` seconds."""
        self.refusal: str | None = None
        self.status: int | None = None
        self.ready = False
        self.begun = False
        self.environment: dict[str, str] = {}  # what the head adds to this node's, once it is ready
        self.left = False
        self._connection = _dial(host, port, timeout)
        _send(self._connection, {"node_rank": node_rank, "nodes": nodes, "host": socket.gethostname()})
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def over(self) -> bool:
        return self.left or self.status is not None or self.refusal is not None

    def fail(self, cause: str) -> None:
        """Tell the head that this node gives up, and why."""
        _send(self._connection, {"failed": cause})

    def ask_to_end(self) -> None:
        """Ask the head to end the run: this node was told to end."""
        _send(self._connection, {"to_end": True})

    def close(self) -> None:
        _hang_up(self._connection)

    def _read(self) -> None:
        with self._connection.makefile("r", encoding="utf-8") as lines:
            try:
                for line in lines:
                    message = json.loads(line)
                    self.environment = message.get("environment", self.environment)
                    self.ready = self.ready or "ready" in message
                    self.begun = self.begun or "begun" in message
                    self.refusal = message.get("refused", self.refusal)
                    self.status = message.get("status", self.status)
            except OSError:  # the head's machine is gone
                self.left = True
        self.left = True


def _dial(host: str, port: int, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the head does not answer at {host}:{port} after {timeout:.0f} s ({error})"
                ) from error
            time.sleep(0.2)


def _hang_up(connection: socket.socket) -> None:
    """Close a connection that another thread reads from (a plain close would wait for that thread)."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end was first
        return
    finally:
        connection.close()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return  # it has left, and whoever reads the connection sees that


def _receive(lines: TextIO) -> dict[str, Any] | None:
    """The next message; None when the other end is gone or talks something else."""
    try:
        message = json.loads(lines.readline())
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
