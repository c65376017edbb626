"""Keep stdout for the output of a command: what libraries and started processes print goes to stderr."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

KEPT_FOR = ("quiet", "json")
"""Values of `observe.console` for which `megarl train` keeps stdout."""

_own: TextIO | None = None  # file descriptor 1 belongs to the process, and so does this


def output() -> TextIO:
    """Return the stream for the output of the command: the kept stdout in the block of `kept_stdout`, else ``sys.stdout``."""
    return sys.stdout if _own is None else _own


@contextlib.contextmanager
def kept_stdout() -> Iterator[TextIO]:
    """In the block, send to stderr what Python, native code and started processes write to stdout. Yields the former stdout.

    Only `output` writes to the former stdout. The end of the block restores both.
    """
    global _own
    python_stdout, outer = sys.stdout, _own
    python_stdout.flush()
    former = os.dup(1)  # not inherited by started processes
    try:
        with open(former, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as own:
            os.dup2(2, 1)
            _own, sys.stdout = own, sys.stderr
            yield own
    finally:
        _own, sys.stdout = outer, python_stdout
        os.dup2(former, 1)
        os.close(former)


def discard(stream: TextIO) -> None:
    """Send the buffer of `stream`, and all later output to its file descriptor, to the null device."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()


def has_no_reader() -> bool:
    """Return whether stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
