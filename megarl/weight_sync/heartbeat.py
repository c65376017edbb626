"""Heartbeats of a session: if a peer dies or stops, every peer's session ends with an error that names it.

Each peer has a connection to the process of the trainers' rank 0. When a process ends, the kernel closes its connection at
once; a busy process keeps it. The kernel does not close the connection of a stopped process, a lost machine, or a process
with a forked child that inherited the socket; heartbeats detect these. During an update, and only then, a thread of each peer
sends a heartbeat every second and receives a reply.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.cluster.key_value_store import listen_at
from megarl.weight_sync.session import Session, WeightSyncError
from megarl.weight_sync.store import StoreChannel

HEARTBEAT_SECONDS = 1.0
_PORT = "heartbeat port"
_LEFT = "left"
_HANDSHAKE = "handshake"
_MAX_MESSAGE = 4096  # bytes
_TIMEOUT_CAUSE = "it is stopped, or its machine or the network is gone (if it only pauses, raise weight_sync.silence)"


def _heartbeat_timeout(session: Session) -> tuple[int, str]:
    """Return how many heartbeats in a row a live peer may miss, and the message for a peer that misses more.

    A busy peer misses at most two: torch, numpy, files and sockets release the GIL, and an import or a garbage collection
    lasts about a second. Heartbeats are counted, not timed, so that a pause of this process ends no other peer's session.
    """
    heartbeats = math.ceil(session.heartbeat_timeout / HEARTBEAT_SECONDS)
    return heartbeats, f"sent no heartbeat for {heartbeats * HEARTBEAT_SECONDS:g} s"


@dataclass
class _Peer:
    connection: socket.socket
    name: str = ""  # set by its first message
    version: int | None = None  # of its current update
    left: bool = False
    missed: int = 0  # heartbeats
    unread: bytes = b""


class HeartbeatMonitor:
    """Ends the session if a peer dies, or misses too many heartbeats in an update. Runs in the trainers' rank 0."""

    def __init__(self, session: Session, channel: StoreChannel) -> None:
        self._session = session
        self._allowed, self._timeout_message = _heartbeat_timeout(session)
        self._listener = listen_at(session.host, backlog=len(session.senders) + len(session.receivers))
        self._stop = threading.Event()
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._listener)
            self._listener.setblocking(False)
            channel.publish(_PORT, self._listener.getsockname()[1])
            threading.Thread(target=self._watch, name="megarl-heartbeat-monitor", daemon=True).start()
            undo.pop_all()  # the thread closes the listener

    def close(self) -> None:
        """Stop within one heartbeat."""
        self._stop.set()

    def _watch(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - ends the session: without a monitor only timeouts would reveal a death
            with contextlib.suppress(WeightSyncError):
                self._session.abort(f"trainer 0 can no longer monitor heartbeats: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        with self._listener, contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            next_round = time.monotonic() + HEARTBEAT_SECONDS
            while not self._stop.is_set():
                for key, _ in selector.select(max(0.0, next_round - time.monotonic())):
                    if key.data is None:
                        self._admit(selector, connections)
                    elif not self._receive(key.data):
                        self._dismiss(selector, key.data, "died", "connection closed by the end of its process")
                if time.monotonic() >= next_round:
                    self._count_missed(selector)
                    next_round = time.monotonic() + HEARTBEAT_SECONDS

    def _admit(self, selector: selectors.BaseSelector, connections: contextlib.ExitStack) -> None:
        # Fails if the peer has hung up already, or if this process has no file descriptors left: the peer reports that.
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            selector.register(connections.enter_context(connection), selectors.EVENT_READ, _Peer(connection))

    def _receive(self, peer: _Peer) -> bool:
        """Process a peer's messages. Returns False if the connection has ended or does not belong to a peer."""
        try:
            data = peer.connection.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return True
        except OSError:  # reset: its process ended with unread data
            return False
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        if not data or len(peer.unread) > _MAX_MESSAGE:
            return False
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # any process of the network can connect to the port
                return False
            if not peer.name:
                peer.name = self._name_from_handshake(message)
                if not peer.name:
                    return False
                continue
            peer.left = message == _LEFT
            peer.version = message if isinstance(message, int) else None
        peer.missed = 0
        with contextlib.suppress(OSError):  # the next read detects a closed connection
            peer.connection.send(b".")
        return True

    def _name_from_handshake(self, message: Any) -> str:
        """Return the peer's name, or "" if the handshake is not signed by a process of the session."""
        name = self._session.verified(_HANDSHAKE, message.encode()) if isinstance(message, str) else None
        return "" if name is None else name.decode()

    def _count_missed(self, selector: selectors.BaseSelector) -> None:
        """Count a missed heartbeat for each peer. Runs every `HEARTBEAT_SECONDS`, after all received messages."""
        for peer in [key.data for key in selector.get_map().values() if key.data is not None]:
            peer.missed += 1
            if peer.missed > self._allowed and (peer.version is not None or not peer.name):
                self._dismiss(selector, peer, self._timeout_message, _TIMEOUT_CAUSE)

    def _dismiss(self, selector: selectors.BaseSelector, peer: _Peer, event: str, cause: str) -> None:
        """Close the peer's connection and, unless it left the session, abort the session."""
        selector.unregister(peer.connection)
        peer.connection.close()
        if not peer.name or peer.left:
            return
        when = "between updates" if peer.version is None else f"in the update to version {peer.version}"
        # An error means that this process, which serves the store, is ending; peers detect that.
        with contextlib.suppress(WeightSyncError):
            self._session.abort(f"{peer.name} {event} {when}: {cause}")


class HeartbeatClient:
    """Sends a peer's heartbeats, and detects the end of the trainers' rank 0, which no other process could report."""

    def __init__(self, channel: StoreChannel, name: str) -> None:
        """Wait for the `HeartbeatMonitor` and connect to it. `name`: of this peer, for messages."""
        session = channel.session
        (self._port,) = channel.wait([_PORT], "the trainers' rank 0 to open the session")
        self._channel = channel
        self._allowed, self._timeout_message = _heartbeat_timeout(session)
        try:
            self._connection = socket.create_connection((session.host, self._port), session.timeout)
        except OSError as error:
            raise WeightSyncError(
                f"{session.host}:{self._port}, where the trainers' rank 0 receives heartbeats, cannot be reached "
                f"({error}); is its process alive, and is the port open between the two hosts?"
            ) from error
        self._version: int | None = None
        self._missed = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the fields above
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._connection.setblocking(False)
            # `_LEFT` must be sent before the connection closes.
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            addresses = socket.getaddrinfo(session.host, session.port, type=socket.SOCK_STREAM)
            self._store_addresses = {info[4][0] for info in addresses}
            peer = f"{name} (process {os.getpid()} on {socket.gethostname()})"
            self._send(session.sign(_HANDSHAKE, peer.encode()).decode())
            threading.Thread(target=self._run, name="megarl-heartbeat", daemon=True).start()
            undo.pop_all()

    def begin(self, version: int) -> None:
        """Send heartbeats from now on, until `end`."""
        if self._channel.lost is not None:
            raise WeightSyncError(f"weight sync has ended: {self._channel.lost}")
        with self._lock:
            self._version, self._missed = version, 0
            self._send(version)

    def end(self) -> None:
        with self._lock:
            self._version = None
            self._send(None)

    @contextlib.contextmanager
    def update(self, version: int) -> Iterator[None]:
        self.begin(version)
        try:
            yield
        finally:
            self.end()

    def close(self) -> None:
        """Leave the session, so that the closed connection does not count as a death. May be called twice."""
        with self._lock:
            if not self._stop.is_set():
                self._stop.set()
                self._send(_LEFT)
                self._connection.close()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone: the next heartbeat detects it
            self._connection.send(json.dumps(message).encode() + b"\n")

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with self._lock:
                if self._stop.is_set() or self._version is None:
                    continue
                self._channel.lost = self._exchange_heartbeat()
            if self._channel.lost is not None:
                self._disconnect_store()  # repeated every time: a connection may just have been made

    def _exchange_heartbeat(self) -> str | None:
        """Send a heartbeat and read replies. Returns why the trainers' rank 0 is gone; None if it is alive."""
        self._send(self._version)
        self._missed += 1
        try:
            if not self._connection.recv(_MAX_MESSAGE):
                return "the process of trainer 0 has ended, left the session, or counted this process as dead"
            self._missed = 0
        except BlockingIOError:
            if self._missed > self._allowed:
                return f"trainer 0 {self._timeout_message}: {_TIMEOUT_CAUSE}"
        except OSError:
            return "connection closed by the end of trainer 0's process"
        return None

    def _disconnect_store(self) -> None:
        """Shut down this process's connections to the store, which ended with trainer 0.

        Without this, a thread that waits for the store's answer would wait past every timeout: torch sets none on its socket.
        """
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                        if is_internet and self._is_store(*connection.getpeername()[:2]):
                            connection.shutdown(socket.SHUT_RDWR)

    def _is_store(self, address: str, port: int) -> bool:
        return port == self._channel.session.port and address.removeprefix("::ffff:") in self._store_addresses
