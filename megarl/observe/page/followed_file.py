"""Read lines that another process appends to a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
_COMPARED = 256  # bytes: two lines with times in them do not end alike


@dataclass(frozen=True)
class AppendedLines:
    """Complete lines since the last read. replaced: the file has been rewritten, so they start at its beginning."""

    lines: list[bytes]
    replaced: bool


class FollowedFile:
    """Returns each complete line of a file once. A line without its newline is returned after the newline is written.

    A file that is replaced or shorter than before is read again from its beginning. A replaced file has another inode, or other bytes
    before the next line: file systems use the inode of a deleted file again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: tuple[int, int] | None = None
        self._before = b""  # the last bytes before the offset

    def has_changed(self) -> bool:
        """Return True if the file has bytes that `read` has not returned. Reads no content."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return self._inode is not None
        return (status.st_dev, status.st_ino) != self._inode or status.st_size != self._offset

    def read(self) -> AppendedLines:
        """Return the lines since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            replaced = self._inode is not None
            self._inode, self._offset, self._before = None, 0, b""
            return AppendedLines([], replaced)
        with file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            replaced = self._inode is not None and (
                inode != self._inode or status.st_size < self._offset or self._bytes_before(file) != self._before
            )
            if replaced or self._inode is None:
                self._offset, self._before = 0, b""
            self._inode = inode
            file.seek(self._offset)
            data = file.read(status.st_size - self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole[-_COMPARED:])[-_COMPARED:]
        return AppendedLines(whole.splitlines(), replaced)

    def start_at(self, offset: int) -> None:
        """Let the first `read` begin at `offset`, where a line begins."""
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._inode, self._offset = (status.st_dev, status.st_ino), offset
            file.seek(max(0, offset - _COMPARED))
            self._before = file.read(min(offset, _COMPARED))

    def _bytes_before(self, file: BinaryIO) -> bytes:
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before))


def lines_from(path: Path, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from the line at `offset` on, without the newline. Reads while the caller iterates.

    The last line is yielded even if it has no newline.
    """
    with path.open("rb", buffering=CHUNK) as file:
        file.seek(offset)
        for line in file:
            yield offset, line.rstrip(b"\n")
            offset += len(line)


def line_at(path: Path, offset: int, longest: int) -> bytes:
    """Return the line that begins at `offset`. Raises ValueError if none does, or if it has more than `longest` bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 <= offset < size:
            raise ValueError(f"{path.name} has {size:,} bytes, so that no line begins at byte {offset:,}")
        if offset:
            file.seek(offset - 1)
            if file.read(1) != b"\n":
                raise ValueError(f"no line of {path.name} begins at byte {offset:,}")
        line = file.readline(longest + 1)
    if len(line) > longest:
        raise ValueError(f"the line at byte {offset:,} of {path.name} has more than {longest:,} bytes")
    return line.rstrip(b"\n")
