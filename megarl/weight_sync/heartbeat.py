"""Heartbeats of a sharded session: if a member dies or stops, the session ends for all members, with its name.

Each member has a connection to the process of the trainers' rank 0. When a process ends, in whatever way, the kernel closes
its connection at once; a busy process never loses it. Stopped processes, lost machines or networks, and connections that a
forked child inherited close nothing. Missing heartbeats reveal those: during an update, and only then, a thread of each
member sends a heartbeat every second and receives a reply.
"""

from __future__ import annotations

import contextlib
import ipaddress
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

from megarl.weight_sync.session import ShardedSession, WeightSyncError
from megarl.weight_sync.store import StoreChannel

HEARTBEAT_SECONDS = 1.0
_PORT = "heartbeat port"
_LEFT = "left"
_MAX_MESSAGE = 4096  # bytes
_TIMEOUT_CAUSE = "it is stopped, or its machine or the network is gone (if it only pauses, raise exchange.silence)"


def _heartbeat_timeout(session: ShardedSession) -> tuple[int, str]:
    """Return how many heartbeats in a row a live member may miss, and the message for more.

    A busy member misses at most two: torch, numpy, files and sockets release the GIL, and an import or a garbage collection
    lasts about a second. Heartbeats are counted, not timed, so that a pause of this process does not count against others.
    """
    heartbeats = math.ceil(session.heartbeat_timeout / HEARTBEAT_SECONDS)
    return heartbeats, f"sent no heartbeat for {heartbeats * HEARTBEAT_SECONDS:g} s"


@dataclass
class _Member:
    connection: socket.socket
    name: str = ""  # set by its first message
    version: int | None = None  # of its current update
    left: bool = False
    missed: int = 0  # heartbeats
    unread: bytes = b""


class HeartbeatMonitor:
    """Ends the session if a member dies, or misses heartbeats during an update. Runs in the trainers' rank 0."""

    def __init__(self, session: ShardedSession, channel: StoreChannel) -> None:
        self._session = session
        self._allowed, self._timeout_message = _heartbeat_timeout(session)
        dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual_stack else socket.AF_INET
        members = len(session.senders) + len(session.receivers)
        if _is_loopback(session.host):
            self._listener = socket.create_server((session.host, 0), backlog=members)
        else:
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual_stack, backlog=members)
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
            selector.register(connections.enter_context(connection), selectors.EVENT_READ, _Member(connection))

    def _receive(self, member: _Member) -> bool:
        """Process a member's messages. Returns False if its connection has ended or is not a member's."""
        try:
            data = member.connection.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return True
        except OSError:  # reset: its process ended with unread data
            return False
        *lines, member.unread = (member.unread + data).split(b"\n")
        if not data or len(member.unread) > _MAX_MESSAGE:
            return False
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # any process of the network can connect to the port
                return False
            if not member.name:
                member.name = self._name_from_handshake(message)
                if not member.name:
                    return False
                continue
            member.left = message == _LEFT
            member.version = message if isinstance(message, int) else None
        member.missed = 0
        with contextlib.suppress(OSError):  # a closed connection shows at the next read
            member.connection.send(b".")
        return True

    def _name_from_handshake(self, message: Any) -> str:
        """Return the peer's name, or "" if the handshake carries the wrong session prefix."""
        valid = isinstance(message, list) and len(message) == 2 and message[0] == self._session.prefix
        return str(message[1]) if valid else ""

    def _count_missed(self, selector: selectors.BaseSelector) -> None:
        """Count a missed heartbeat for each member. Runs every `HEARTBEAT_SECONDS`, after all received messages."""
        for member in [key.data for key in selector.get_map().values() if key.data is not None]:
            member.missed += 1
            if member.missed > self._allowed and (member.version is not None or not member.name):
                self._dismiss(selector, member, self._timeout_message, _TIMEOUT_CAUSE)

    def _dismiss(self, selector: selectors.BaseSelector, member: _Member, event: str, cause: str) -> None:
        selector.unregister(member.connection)
        member.connection.close()
        if not member.name or member.left:
            return
        when = "between updates" if member.version is None else f"in the update to version {member.version}"
        with contextlib.suppress(WeightSyncError):  # this process serves the store: it is ending, and members see that
            self._session.abort(f"{member.name} {event} {when}: {cause}")


def _is_loopback(host: str) -> bool:
    """Return True if all members run on this machine, so that the port need not be reachable from others."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


class HeartbeatClient:
    """Sends a member's heartbeats, and detects the end of the trainers' rank 0, which no other process could report."""

    def __init__(self, channel: StoreChannel, name: str) -> None:
        """Wait for the `HeartbeatMonitor` and connect to it. `name`: of this member, for messages."""
        session = channel.session
        assert isinstance(session, ShardedSession), "only sharded sessions have heartbeats"
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
            self._send([session.prefix, f"{name} (process {os.getpid()} on {socket.gethostname()})"])
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
