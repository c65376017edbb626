"""Messages between processes of the same user, as length-prefixed pickles over a stream socket.

Under torchrun they carry the calls to trainers and services, with objects of `megarl/types.py`; under Ray, Ray does. Processes of
`subprocess_pool/` use them in both cases.
"""

from __future__ import annotations

import pickle
import queue
import socket
import struct
import threading
from typing import Any

LENGTH = struct.Struct("!Q")


class UnreadableMessage(RuntimeError):
    """A whole message has arrived that cannot be unpickled, e.g. because this process lacks a module. The next one can be read."""


def packed(message: Any) -> bytes:
    """Serialize a message with its length prefix. Raises pickling errors."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


class Wire:
    """One end of a connection. `send` may be called from any thread, `receive` from a single thread.

    Unpickling is safe here because only processes of the same user can reach the socket: a socket pair inherited
    by a child, or a Unix socket in a directory with mode 0700.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the other end is closed, and pickling errors."""
        self.send_packed(packed(message))

    def send_packed(self, data: bytes) -> None:
        """Send a message that `packed` has serialized. Raises OSError if the other end is closed."""
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> Any:
        """Receive the next message. Raises EOFError if the other end is closed, and UnreadableMessage."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        data = self._read(length)
        try:
            return pickle.loads(data)  # noqa: S301 -- see the class
        except Exception as error:
            raise UnreadableMessage(f"a message cannot be read: {type(error).__name__}: {error}") from error

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, have = memoryview(data), 0
        while have < count:
            try:
                got = self._socket.recv_into(view[have:])
            except OSError as error:
                raise EOFError(str(error)) from error
            if got == 0:
                raise EOFError("the connection was closed")
            have += got
        return data

    def close(self) -> None:
        """Close both directions, which wakes up a thread that waits in `receive`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end closed first
            return
        finally:
            self._socket.close()


class SendQueue:
    """Sends messages over a wire from a thread: a stopped process does not read, and a write to a full socket blocks."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Queue a message without blocking. Raises pickling errors."""
        self._messages.put(packed(message))

    def finish(self, seconds: float) -> None:
        """Wait up to `seconds` until all queued messages are sent, and end the thread."""
        self._messages.put(None)
        self._thread.join(seconds)

    def _send(self) -> None:
        while (data := self._messages.get()) is not None:
            try:
                self._wire.send_packed(data)
            except OSError:
                return  # the process has ended; the reader of the wire reports it
