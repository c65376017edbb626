"""The pool's end of a connection to a process that may stop at any moment."""

from __future__ import annotations

import contextlib
import socket

from megarl.cluster.torchrun.wire import LENGTH, packed

CHUNK = 1 << 18


class NonblockingChannel:
    """Speaks as `megarl.cluster.torchrun.wire.Wire`, and never waits: a process that does not read, or that stops in the middle of
    a message, holds up nobody."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.ended = connection, False
        self._incoming, self._outgoing = bytearray(), bytearray()

    @property
    def waiting(self) -> bool:
        """Whether something is still to be sent: call `flush` when the connection can be written to."""
        return bool(self._outgoing)

    def send(self, message: object) -> None:
        self._outgoing += packed(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as the connection takes. That its other end is gone is heard of in `receive`."""
        try:
            while self._outgoing:
                del self._outgoing[: self.connection.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """The messages that have come, pickled; `ended` says whether there can be more."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    data = self.connection.recv(CHUNK)
                except ConnectionResetError:
                    data = b""
                self._incoming += data
                self.ended = not data
        return self._whole()

    def _whole(self) -> list[bytes]:
        messages = []
        while len(self._incoming) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[LENGTH.size : end]))
            del self._incoming[:end]
        return messages
