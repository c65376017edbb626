"""A mark in shared memory that names the call a process is executing, readable even if the process hangs."""

from __future__ import annotations

import contextlib
import mmap
import struct
import tempfile
import time
from collections.abc import Iterator

_MARK = struct.Struct("qd")
IDLE = -1


class ProgressMark:
    """A few shared bytes, written by a process and read by its pool: the number of the current call and its start time.

    Times come from time.monotonic.
    """

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, _MARK.size)

    @contextlib.contextmanager
    def executing(self, number: int) -> Iterator[None]:
        """Mark call `number` as executing until the context exits."""
        _MARK.pack_into(self._bytes, 0, number, time.monotonic())
        try:
            yield
        finally:
            _MARK.pack_into(self._bytes, 0, IDLE, 0.0)

    def read(self) -> tuple[int, float]:
        """Return the call's number, or `IDLE`, and its start time."""
        number, since = _MARK.unpack_from(self._bytes)
        return number, since

    def close(self) -> None:
        self._bytes.close()


@contextlib.contextmanager
def new_progress_mark() -> Iterator[tuple[ProgressMark, int]]:
    """Create a mark and a descriptor to pass to the other process. The descriptor is open inside the context only."""
    with tempfile.TemporaryFile() as file:
        file.write(_MARK.pack(IDLE, 0.0))
        file.flush()
        yield ProgressMark(file.fileno()), file.fileno()
