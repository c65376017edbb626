"""Who takes part in a planned exchange is alive; or the session ends for everyone, with the name of who is not.

Each member has a connection to the process of the trainers' rank 0. A process that ends, however it does, closes its own:
the kernel tells that at once, and never of one that is merely busy. What closes nothing (a process that was stopped, a
machine or network that is gone, a connection that a forked child still holds) shows by missing beats: a thread of each
member sends one a second, and gets one back, while the member is in an update, and at no other time.
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

BEAT_SECONDS = 1.0
_PORT = "vigil"
_LEFT = "left"
_LONGEST = 4096  # bytes of a message
_SILENT = "it is stopped, or its machine or the network is gone (if it only pauses, raise exchange.silence)"


def _silence(session: ShardedSession) -> tuple[int, str]:
    """After how many missing beats in a row a member is silent, and what is said of it then.

    A busy one misses none or two: torch, numpy, files and sockets let other threads run, and what does not (an import, a
    garbage collection) lasts a second or so. They are counted, not timed, so that nobody takes a pause of its own for the
    silence of others."""
    beats = math.ceil(session.heartbeat_timeout / BEAT_SECONDS)
    return beats, f"gave no sign of life for {beats * BEAT_SECONDS:g} s"


@dataclass
class _Member:
    connection: socket.socket
    who: str = ""  # once it has said so
    version: int | None = None  # of the update that it is in
    left: bool = False
    missing: int = 0  # beats
    unread: bytes = b""


class HeartbeatMonitor:
    """In the process of the trainers' rank 0: ends the session where a member is gone, or silent in an update."""

    def __init__(self, session: ShardedSession, channel: StoreChannel) -> None:
        self._session = session
        self._beats, self._silent = _silence(session)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        everyone = len(session.senders) + len(session.receivers)
        if _is_loopback(session.host):
            self._listener = socket.create_server((session.host, 0), backlog=everyone)
        else:
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=everyone)
        self._over = threading.Event()
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._listener)
            self._listener.setblocking(False)
            channel.publish(_PORT, self._listener.getsockname()[1])
            threading.Thread(target=self._watch, name="megarl-heartbeat-monitor", daemon=True).start()
            undo.pop_all()  # it is the thread's now

    def close(self) -> None:
        """End the watch, within a beat."""
        self._over.set()

    def _watch(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - told to everyone: unwatched, a death would be found by time-outs alone
            with contextlib.suppress(WeightSyncError):
                self._session.abort(f"trainer 0 can no longer watch over the others: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        with self._listener, contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            next_round = time.monotonic() + BEAT_SECONDS
            while not self._over.is_set():
                for key, _ in selector.select(max(0.0, next_round - time.monotonic())):
                    if key.data is None:
                        self._admit(selector, connections)
                    elif not self._heard(key.data):
                        self._dismiss(selector, key.data, "died", "connection closed by the end of its process")
                if time.monotonic() >= next_round:
                    self._count(selector)
                    next_round = time.monotonic() + BEAT_SECONDS

    def _admit(self, selector: selectors.BaseSelector, connections: contextlib.ExitStack) -> None:
        # Whoever called has hung up already; or no files are left, which it will say.
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            selector.register(connections.enter_context(connection), selectors.EVENT_READ, _Member(connection))

    def _heard(self, member: _Member) -> bool:
        """Take in what it said. False where it is gone."""
        try:
            said = member.connection.recv(_LONGEST)
        except BlockingIOError:
            return True
        except OSError:  # reset, as by the end of a process that had not read everything
            return False
        *lines, member.unread = (member.unread + said).split(b"\n")
        if not said or len(member.unread) > _LONGEST:
            return False
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # the port is open to anybody
                return False
            if not member.who:
                member.who = self._introduced(message)
                if not member.who:
                    return False
                continue
            member.left = message == _LEFT
            member.version = message if isinstance(message, int) else None
        member.missing = 0
        with contextlib.suppress(OSError):  # it is gone, which the next look tells
            member.connection.send(b".")
        return True

    def _introduced(self, message: Any) -> str:
        """Who that is; nobody, of whom does not know the session."""
        known = isinstance(message, list) and len(message) == 2 and message[0] == self._session.prefix
        return str(message[1]) if known else ""

    def _count(self, selector: selectors.BaseSelector) -> None:
        """Once in each `BEAT_SECONDS`, when everything that has come was heard."""
        for member in [key.data for key in selector.get_map().values() if key.data is not None]:
            member.missing += 1
            if member.missing > self._beats and (member.version is not None or not member.who):
                self._dismiss(selector, member, self._silent, _SILENT)

    def _dismiss(self, selector: selectors.BaseSelector, member: _Member, what: str, why: str) -> None:
        selector.unregister(member.connection)
        member.connection.close()
        if not member.who or member.left:
            return
        when = "while it was in no update" if member.version is None else f"in the update to version {member.version}"
        with contextlib.suppress(WeightSyncError):  # this process keeps the store: it ends, and everyone sees that
            self._session.abort(f"{member.who} {what} {when}: {why}")


def _is_loopback(host: str) -> bool:
    """Whether all members are on this machine: nobody else needs to reach it then."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


class HeartbeatClient:
    """Of a member: says that it lives, and finds out where the trainers' rank 0, which all others hear of, does not."""

    def __init__(self, channel: StoreChannel, who: str) -> None:
        """`who`: its name, in messages. Waits for the `HeartbeatMonitor`."""
        session = channel.session
        assert isinstance(session, ShardedSession), "no other exchange has members that beat"
        (self._port,) = channel.wait([_PORT], "the trainers' rank 0 to open the exchange")
        self._channel = channel
        self._beats, self._silent = _silence(session)
        try:
            self._connection = socket.create_connection((session.host, self._port), session.timeout)
        except OSError as error:
            raise WeightSyncError(
                f"{session.host}:{self._port}, where the trainers' rank 0 listens for signs of life, cannot be reached "
                f"({error}); is its process alive, and is the port open between the two hosts?"
            ) from error
        self._version: int | None = None
        self._missing = 0
        self._over = threading.Event()
        self._lock = threading.Lock()  # of all of these
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._connection.setblocking(False)
            # `left` must be on its way before the end.
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = socket.getaddrinfo(session.host, session.port, type=socket.SOCK_STREAM)
            self._store = {info[4][0] for info in found}
            self._say([session.prefix, f"{who} (process {os.getpid()} on {socket.gethostname()})"])
            threading.Thread(target=self._beat, name="megarl-heartbeat", daemon=True).start()
            undo.pop_all()

    def begin(self, version: int) -> None:
        """This member is in an update, until `end`."""
        if self._channel.lost is not None:
            raise WeightSyncError(f"the weight exchange has ended: {self._channel.lost}")
        with self._lock:
            self._version, self._missing = version, 0
            self._say(version)

    def end(self) -> None:
        with self._lock:
            self._version = None
            self._say(None)

    @contextlib.contextmanager
    def update(self, version: int) -> Iterator[None]:
        self.begin(version)
        try:
            yield
        finally:
            self.end()

    def close(self) -> None:
        """Leave, so that the connection's end is nobody's death. May be called twice."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self._say(_LEFT)
                self._connection.close()

    def _say(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone, which the next beat finds out
            self._connection.send(json.dumps(message).encode() + b"\n")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with self._lock:
                if self._over.is_set() or self._version is None:
                    continue
                self._channel.lost = self._lost()
            if self._channel.lost is not None:
                self._hang_up()  # again with each beat: a connection may just have been made

    def _lost(self) -> str | None:
        """Why there is no trainers' rank 0 any more; None where it lives."""
        self._say(self._version)
        self._missing += 1
        try:
            if not self._connection.recv(_LONGEST):
                return "the process of trainer 0 has ended, left the exchange, or took this process for silent"
            self._missing = 0
        except BlockingIOError:
            if self._missing > self._beats:
                return f"trainer 0 {self._silent}: {_SILENT}"
        except OSError:
            return "connection closed by the end of trainer 0's process"
        return None

    def _hang_up(self) -> None:
        """End this process's connections to the store, which lives with trainer 0: whoever waits for its answer would go on
        waiting, also past every time-out, since torch sets none for this."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as one:
                        if one.family in (socket.AF_INET, socket.AF_INET6) and self._is_store(*one.getpeername()[:2]):
                            one.shutdown(socket.SHUT_RDWR)

    def _is_store(self, address: str, port: int) -> bool:
        return port == self._channel.session.port and address.removeprefix("::ffff:") in self._store
