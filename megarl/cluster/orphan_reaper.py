"""No orphans: a tiny process that outlives its owner just long enough to end what the owner started.

Every process that the owner starts carries the guard's mark in its environment and hands it on to its
own children (Ray's helpers, an engine's workers). When the owner is gone, however it went, the
guard kills whatever carries the mark. This file runs as a script too, and imports nothing of megarl.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

VARIABLE = "MEGARL_GUARD"
POLL = 0.3  # seconds between looks at the owner


class Guard:
    """Ends the processes that carry its mark, at the latest when this process ends."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(os.getpid()), self.mark],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal is not meant for it
        )

    @property
    def env(self) -> dict[str, str]:
        """What the guarded processes need in their environment."""
        # setproctitle, with which Ray renames its processes, writes over their environment unless told not to.
        return {VARIABLE: self.mark, "SPT_NOENV": "1"}

    def close(self) -> None:
        """End the guarded processes now, and the guard."""
        sweep(self.mark)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def marked(mark: str) -> list[int]:
    """Ids of this user's processes, apart from this one, whose environment carries `mark`."""
    entry = f"{VARIABLE}={mark}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if entry in variables and int(environ.parent.name) != os.getpid():
            found.append(int(environ.parent.name))
    return found


def sweep(mark: str, seconds: float = 5.0) -> None:
    """Kill what carries `mark` until nothing is left (a process may start another while we look)."""
    deadline = time.monotonic() + seconds
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _watch(owner: int, mark: str) -> None:
    while os.getppid() == owner:
        readable, _, _ = select.select([sys.stdin], [], [], POLL)
        if readable:  # end of file: the owner closed its end, or is gone
            break
    sweep(mark)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
