"""The stream of a console, which does not end the run when it cannot be written to."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TextIO

from megarl.observe.stdout import discard


class ConsoleStream:
    """Passes text on to `stream` until that fails: its reader has ended, its terminal is gone, or the disk of its file is full.

    From then on everything written is dropped, also what the command itself writes to the stream's file descriptor. One line on
    stderr has the reason, and `take_failure` returns it for the files of the run. Several threads may write.
    """

    def __init__(self, stream: TextIO) -> None:
        # Half a surrogate pair in a sample, or another encoding, must not end the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self._stream = stream
        self.encoding = stream.encoding
        self._stderr = sys.stderr  # a live display sends later output on stderr to this stream
        self._is_on = True
        self._failure: str | None = None

    def write(self, text: str) -> int:
        if self._is_on:
            try:
                self._stream.write(text)
            except OSError as error:
                self._turn_off(error)
        return len(text)

    def flush(self) -> None:
        if self._is_on:
            try:
                self._stream.flush()
            except OSError as error:
                self._turn_off(error)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def take_failure(self) -> str | None:
        """Return the reason for which the stream was turned off, at the first call after that; else None."""
        failure, self._failure = self._failure, None
        return failure

    def _turn_off(self, error: OSError) -> None:
        self._is_on = False
        self._failure = f"writing to stdout failed ({type(error).__name__}: {error}): the console is off until the end of this command."
        discard(self._stream)
        with contextlib.suppress(OSError):  # the same terminal, perhaps
            print(self._failure, file=self._stderr, flush=True)
