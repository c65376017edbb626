"""Rendezvous of the launchers of one run.

Every member node connects to the head's launcher and waits on that connection: for the head to be ready, for all nodes
to join and, at the end, for the run's exit status. A member that fails sends the cause.

Messages are lines of JSON, of at most `LONGEST_LINE` bytes; nothing is executed or unpickled. The head draws a challenge for
each connection, and a member replies with a proof that it knows the run's secret (`join_secret`). The secret is never sent,
and a connection without the proof is closed before its rank counts as taken.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from megarl.commands.launch.join_secret import proof

LONGEST_LINE = 1 << 16  # bytes
PROOF_SECONDS = 10.0  # time for a connection to prove that it belongs to the run, from the first to the last byte
MOST_UNKNOWN = 64  # connections without a proof at a time; further ones wait
LOST_SECONDS = 60  # silence after which the kernel closes the connection to a machine without power or network
_WRONG_SECRET = "it does not know the secret of this run"


class RendezvousServer:
    """The head's end.

    nodes: number of nodes, the head included. secret: the run's.
    """

    def __init__(self, host: str, port: int, nodes: int, secret: str) -> None:
        self._nodes, self._secret = nodes, secret
        self._ready = {"ready": True}
        self._unknown = threading.Semaphore(MOST_UNKNOWN)
        self._lock = threading.Lock()
        self._present: dict[int, tuple[socket.socket, str]] = {}
        self._failed: dict[int, str] = {}
        self._ending: set[int] = set()
        self._open = False
        self._listener = socket.create_server((host, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def absent(self) -> list[int]:
        """Ranks of members that are not connected."""
        with self._lock:
            return [rank for rank in range(1, self._nodes) if rank not in self._present]

    def failed(self) -> dict[int, str]:
        """Causes of failed members, by rank."""
        with self._lock:
            return dict(self._failed)

    def ending(self) -> list[int]:
        """Ranks of connected members that received a signal and wait for their release or the end of the run."""
        with self._lock:
            return sorted(self._ending)

    def release(self, rank: int) -> None:
        """Send a member that received a signal that the run goes on without it."""
        with self._lock:
            self._ending.discard(rank)
            if rank in self._present:
                _send(self._present[rank][0], {"released": True})

    def open(self) -> None:
        """Send present and future members that the head is ready for them."""
        with self._lock:
            self._open = True
        self._send_all(self._ready)

    def begin(self) -> None:
        """Send the members that all nodes have joined."""
        self._send_all({"begun": True})

    def _send_all(self, message: dict[str, Any]) -> None:
        with self._lock:
            for connection, _ in self._present.values():
                _send(connection, message)

    def finish(self, status: int) -> None:
        """Send the members the run's exit status and close their connections."""
        with self._lock:
            self._listener.close()
            for connection, _ in self._present.values():
                _send(connection, {"status": status})
                _hang_up(connection)
            self._present = {}

    def _accept(self) -> None:
        while True:
            self._unknown.acquire()
            try:
                connection, _ = self._listener.accept()
                _set_keepalive(connection)
            except OSError:  # closed by `finish`
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("r", encoding="utf-8") as lines:
            self._serve_node(connection, lines)

    def _serve_node(self, connection: socket.socket, lines: TextIO) -> None:
        # A timeout of the socket would begin anew with each byte.
        limit = threading.Timer(PROOF_SECONDS, _hang_up, (connection,))
        limit.daemon = True
        limit.start()
        try:
            challenge = secrets.token_hex(16)
            _send(connection, {"challenge": challenge})
            hello = _receive(lines)
            refusal = self._refusal(challenge, hello) or self._admit(connection, hello or {})
        finally:
            limit.cancel()
            self._unknown.release()
        if refusal:
            _send(connection, {"refused": refusal})
            connection.close()
            return
        assert hello is not None
        rank = hello["node_rank"]
        while (message := _receive(lines)) is not None:  # None: the connection is closed
            with self._lock:
                if "failed" in message:
                    self._failed[rank] = str(message["failed"])
                if "ending" in message:
                    self._ending.add(rank)
        with self._lock:
            if self._present.get(rank, (None, ""))[0] is connection:
                del self._present[rank]
                self._ending.discard(rank)

    def _refusal(self, challenge: str, hello: dict[str, Any] | None) -> str | None:
        """Return why a connection does not belong to the run."""
        if hello is None or not isinstance(hello.get("node_rank"), int):
            return "not a node of this run"
        is_proof = hmac.compare_digest(
            str(hello.get("proof")).encode(errors="replace"), proof(self._secret, challenge, hello).encode()
        )
        return None if is_proof else _WRONG_SECRET

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> str | None:
        rank, host = hello["node_rank"], str(hello.get("host"))
        with self._lock:
            if hello.get("nodes") != self._nodes:
                return f"the head expects {self._nodes} nodes, this node {hello.get('nodes')}"
            if rank in self._present:
                return (
                    f"node rank {rank} is taken by {self._present[rank][1]}: set this node's own NODE_RANK. The rank of a machine "
                    f"that lost its power or network is free {LOST_SECONDS} s later: then start this node again"
                )
            if not 0 < rank < self._nodes:
                return f"node rank {rank} is not between 1 and {self._nodes - 1}"
            self._present[rank] = connection, host
            _send(connection, {"admitted": True})
            if self._open:
                _send(connection, self._ready)
        return None


class RendezvousClient:
    """A member's end. A thread sets `refusal`, `ready`, `begun`, `released` and `status` as messages arrive, and `left` if the head
    closes the connection. `released`: the run goes on without this node. `is_misled`: what answers is another program."""

    def __init__(self, host: str, port: int, node_rank: int, nodes: int, timeout: float, secret: str) -> None:
        """Raises TimeoutError if the head cannot be reached within `timeout` seconds."""
        self.refusal: str | None = None
        self.status: int | None = None
        self.admitted = False
        self.ready = False
        self.begun = False
        self.released = False
        self.left = False
        self.is_misled = False
        self._connection = _dial(host, port, timeout)
        hello = {"node_rank": node_rank, "nodes": nodes, "host": socket.gethostname()}
        prove: Callable[[str], str] = lambda challenge: proof(secret, challenge, hello)  # noqa: E731
        threading.Thread(target=self._read, args=(hello, prove), daemon=True).start()

    @property
    def has_wrong_secret(self) -> bool:
        """True if the head has another secret: this node's secret is from an earlier run."""
        return self.refusal == _WRONG_SECRET

    @property
    def over(self) -> bool:
        return self.left or self.status is not None or self.refusal is not None or self.released

    def fail(self, cause: str) -> None:
        """Send the head the cause of this node's failure."""
        _send(self._connection, {"failed": cause})

    def request_end(self) -> None:
        """Request the release of this node from the head, or else the end of the run, after a signal on this node."""
        _send(self._connection, {"ending": True})

    def close(self) -> None:
        _hang_up(self._connection)

    def _read(self, hello: dict[str, Any], prove: Callable[[str], str]) -> None:
        with self._connection.makefile("r", encoding="utf-8") as lines:
            try:
                while line := lines.readline(LONGEST_LINE):
                    message = json.loads(line)
                    if not isinstance(message, dict):
                        raise ValueError("not an object")
                    if "challenge" in message:
                        _send(self._connection, hello | {"proof": prove(str(message["challenge"]))})
                    self.admitted = self.admitted or "admitted" in message
                    self.ready = self.ready or "ready" in message
                    self.begun = self.begun or "begun" in message
                    self.released = self.released or "released" in message
                    self.refusal = message.get("refused", self.refusal)
                    self.status = message.get("status", self.status)
            except (ValueError, RecursionError):  # not JSON, or not UTF-8
                self.is_misled = True
            except OSError:  # the head's machine is lost
                return
            finally:
                self.left = True


def _dial(host: str, port: int, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.settimeout(None)
            _set_keepalive(connection)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the head did not answer at {host}:{port} within {timeout:.0f} s ({error})"
                ) from error
            time.sleep(0.2)


def _set_keepalive(connection: socket.socket) -> None:
    """Let the kernel close `connection` after `LOST_SECONDS` without a reply of the other machine, which may have lost its power."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"TCP_KEEPIDLE": LOST_SECONDS // 2, "TCP_KEEPINTVL": LOST_SECONDS // 6, "TCP_KEEPCNT": 3}
    unanswered = {"TCP_USER_TIMEOUT": LOST_SECONDS * 1000}  # of a message on its way, during which no probe is sent
    for name, value in {**probes, **unanswered}.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hang_up(connection: socket.socket) -> None:
    """Close a connection that another thread reads from (a plain close would wait for that thread)."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end closed first
        return
    finally:
        connection.close()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return  # the connection is closed; its reader notices that


def _receive(lines: TextIO) -> dict[str, Any] | None:
    """Receive the next message; None if the connection is closed or silent, or if the line is too long or not a JSON object."""
    try:
        message = json.loads(lines.readline(LONGEST_LINE))  # the start of a longer line is not JSON
    except (OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
