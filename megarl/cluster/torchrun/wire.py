"""Messages between this user's own processes: a length, then a pickle, over a stream socket."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

LENGTH = struct.Struct("!Q")


def packed(message: Any) -> bytes:
    """A message as it is sent. Raises what pickle raises for what it cannot take."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


class Wire:
    """One end of a connection. `send` may be called from any thread, `receive` from one.

    Pickles are read from sockets that only processes of the same user can reach: a socket pair
    inherited by a child, or a Unix socket in a directory closed to others.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises OSError when the other end is gone, and what pickle raises for what it cannot take."""
        self.send_packed(packed(message))

    def send_packed(self, data: bytes) -> None:
        """What `packed` has made of a message. Raises OSError when the other end is gone."""
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> Any:
        """The next message. Raises EOFError when the other end is gone."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return pickle.loads(self._read(length))  # noqa: S301 -- see the class

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
        """Close both directions, so that a thread that waits in `receive` wakes up."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was first
            return
        finally:
            self._socket.close()
