"""Which of the calls under way in a process it is at, told even where the process answers no more."""

from __future__ import annotations

import contextlib
import mmap
import struct
import tempfile
import time
from collections.abc import Iterator

_MARK = struct.Struct("qd")
NOTHING = -1


class ProgressMark:
    """A few bytes that a process writes and its pool reads, whatever has become of the process: the number of the call
    that it is at, and since when, by time.monotonic."""

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, _MARK.size)

    @contextlib.contextmanager
    def at(self, number: int) -> Iterator[None]:
        _MARK.pack_into(self._bytes, 0, number, time.monotonic())
        try:
            yield
        finally:
            _MARK.pack_into(self._bytes, 0, NOTHING, 0.0)

    def read(self) -> tuple[int, float]:
        """A number, or `NOTHING`, and the time."""
        number, since = _MARK.unpack_from(self._bytes)
        return number, since

    def close(self) -> None:
        self._bytes.close()


@contextlib.contextmanager
def new_progress_mark() -> Iterator[tuple[ProgressMark, int]]:
    """A mark, and a descriptor for the other process, open for as long as the context is."""
    with tempfile.TemporaryFile() as file:
        file.write(_MARK.pack(NOTHING, 0.0))
        file.flush()
        yield ProgressMark(file.fileno()), file.fileno()
