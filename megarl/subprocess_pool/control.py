"""The pool's connection to its fork server: commands to it, and its messages."""

from __future__ import annotations

import json
import selectors
import socket
from array import array
from collections import deque

from megarl.subprocess_pool.fork_server import PACKET


class ControlConnection:
    """Packets of a socket pair. `read_ahead`: messages that arrived while a command could not be sent; `receive` returns them first."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.read_ahead: deque[bytes] = deque()

    def command(self, command: str, number: int, *descriptors: int) -> None:
        """Send a command. Raises OSError if the fork server has ended.

        While the fork server does not read, its messages are read here: it may be blocked until they are.
        """
        data = json.dumps([command, number]).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        while True:
            try:
                self.connection.sendmsg([data], rights, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._wait()

    def receive(self) -> bytes:
        """Return the fork server's next message; empty if it has ended."""
        return self.read_ahead.popleft() if self.read_ahead else self._received()

    def _received(self) -> bytes:
        try:
            return self.connection.recv(PACKET)
        except ConnectionResetError:
            return b""

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            for _, events in selector.select():
                if events & selectors.EVENT_READ:
                    self.read_ahead.append(self._received())
