"""The pool's end of a connection to a process that may stop at any time."""

from __future__ import annotations

import contextlib
import socket

from megarl.cluster.wire import LENGTH, packed

CHUNK = 1 << 18


class NonblockingChannel:
    """Pickled messages in the format of `megarl.cluster.wire.Wire`, without blocking.

    A peer that does not read, or that stops in the middle of a message, never delays the caller.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.ended = connection, False
        self._incoming, self._outgoing = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        """True if bytes are still unsent: call `flush` when the connection is writable."""
        return bool(self._outgoing)

    def send(self, message: object) -> None:
        self._outgoing += packed(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as the connection accepts. `receive` reports a closed connection."""
        try:
            while self._outgoing:
                del self._outgoing[: self.connection.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """Return the complete messages received so far, still pickled. Sets `ended` when the peer has closed."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    data = self.connection.recv(CHUNK)
                except ConnectionResetError:
                    data = b""
                self._incoming += data
                self.ended = not data
        return self._complete_messages()

    def _complete_messages(self) -> list[bytes]:
        messages = []
        while len(self._incoming) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[LENGTH.size : end]))
            del self._incoming[:end]
        return messages
