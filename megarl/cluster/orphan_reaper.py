"""Orphan reaper: a small process that kills its owner's descendants when the owner ends, even by SIGKILL.

Every process that the owner starts has the reaper's mark in its environment, and its children inherit it
(Ray's helpers, an engine's workers). When the owner has ended, the reaper kills every process with the mark.
This file also runs as a script and imports nothing from megarl.
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
POLL = 0.3  # seconds between checks of the owner


class OrphanReaper:
    """Kills the processes that have its mark, at the latest when this process ends."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(os.getpid()), self.mark],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal must not end it
        )

    @property
    def env(self) -> dict[str, str]:
        """Variables that mark a process; pass them to every process to kill."""
        # Ray renames its processes with setproctitle, which overwrites their environment unless SPT_NOENV is set.
        return {VARIABLE: self.mark, "SPT_NOENV": "1"}

    def close(self) -> None:
        """Kill the marked processes now, and end the reaper."""
        sweep(self.mark)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def marked(mark: str, variable: str = VARIABLE) -> list[int]:
    """Process ids of this user that have `variable`=`mark` in their environment, without this process."""
    entry = f"{variable}={mark}".encode()
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # Path.glob fails if a process ends while it looks (ESRCH)
        try:
            variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended or belongs to another user
            continue
        if entry in variables and int(name) != os.getpid():
            pids.append(int(name))
    return pids


def sweep(mark: str, seconds: float = 5.0, variable: str = VARIABLE) -> None:
    """Kill processes with `variable`=`mark` until none is left: a process may start another during a pass."""
    deadline = time.monotonic() + seconds
    while (pids := marked(mark, variable)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _watch(owner: int, mark: str) -> None:
    while os.getppid() == owner:
        readable, _, _ = select.select([sys.stdin], [], [], POLL)
        if readable:  # end of file: the owner closed the pipe or has ended
            break
    sweep(mark)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
