"""Output of worker processes, on its way to the log of the pool's process: all up to a limit, then none.

A function that prints in each call would otherwise fill the disk of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

LIMIT = 16 << 20
"""Bytes of a pool's workers that reach the log."""

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class WorkerOutput:
    """A pipe that workers write to and the fork server reads. `limit`: bytes that are passed on; the rest is dropped."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.read_end, self._write_end = os.pipe()
        with contextlib.suppress(OSError):  # not allowed here: with a smaller pipe, writes are slower
            fcntl.fcntl(self._write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._limit = self._left = limit

    def fileno(self) -> int:
        """Descriptor that is readable when `forward` has something to do."""
        return self.read_end

    def redirect(self) -> None:
        """Send this process's stdout and stderr to the pipe. Call it in a worker."""
        for descriptor in (1, 2):
            os.dup2(self._write_end, descriptor)
        os.close(self._write_end)
        os.close(self.read_end)

    def forward(self) -> None:
        """Pass on what workers have written to this process's stdout."""
        data = os.read(self.read_end, _READ_BYTES)
        if not self._left:
            return
        _write(data[: self._left])
        self._left = max(0, self._left - len(data))
        if not self._left:
            text = f"\n[the processes of this pool printed {self._limit} bytes; their further output is dropped]\n"
            _write(text.encode())

    def drain(self) -> None:
        """Pass on the rest when all workers have ended."""
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.forward()


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
