"""Faults for `benchmarks.deaths`: of a process, of its connections, and of the file systems of a run. Linux, as root.

unshare --map-root-user --mount python -m benchmarks.deaths ...     # for other users
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

from megarl.rewards import ScoreRequest
from tests.support.scorers import letters

_SEIZE, _INTERRUPT, _GETFD, _NEW_MOUNTS = 0x4206, 0x4207, 438, 0x20000  # of Linux: ptrace, pidfd_getfd, unshare
_WALL = 0x40000000  # waitpid: threads too
_libc = ctypes.CDLL(None, use_errno=True)


def strike(pid: int, kind: str) -> None:
    """Hit a process. kind: "kill" (SIGKILL), "stop" (SIGSTOP), "hang" (no thread runs, and the state is not "stopped") or "close" (each
    TCP connection is shut down). Raises ProcessLookupError if it has ended."""
    if kind in ("kill", "stop"):
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "hang":
        hang(pid)
    else:
        close_connections(pid)


def hang(pid: int) -> subprocess.Popen[bytes]:
    """Halt all threads of a process, from a child process that traces them until the process has ended or the child is killed."""
    os.kill(pid, 0)
    return subprocess.Popen([sys.executable, "-m", "benchmarks.injection", str(pid)])


def trace(pid: int) -> None:
    """Halt all threads of a process until it ends. The tracer must reap the threads, or the parent does not notice the end."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        for request in (_SEIZE, _INTERRUPT):
            if _libc.ptrace(request, int(thread), None, None) < 0 and ctypes.get_errno() != errno.ESRCH:
                raise OSError(ctypes.get_errno(), f"ptrace of thread {thread}")
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, _WALL)


def close_connections(pid: int) -> int:
    """Shut down each TCP connection of a process, and return their number."""
    process, closed = os.pidfd_open(pid), 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        copy = _libc.syscall(_GETFD, process, int(fd), 0)
        if copy < 0:
            continue  # it has been closed meanwhile
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=copy) as connection:  # OSError: it listens only
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)
                closed += 1
    os.close(process)
    return closed


def slow_letters(request: ScoreRequest) -> dict[str, float]:
    """Score as `tests.support.scorers.letters`, with a file in MEGARL_SCORING meanwhile, named like this process."""
    mark = Path(os.environ["MEGARL_SCORING"]) / str(os.getpid())
    mark.touch()
    time.sleep(0.1)
    mark.unlink(missing_ok=True)
    return letters(request)


def mount_private(*sizes: tuple[Path, str]) -> None:
    """Mount empty file systems in memory, of these sizes, for this process and its children alone."""
    if _libc.unshare(_NEW_MOUNTS) != 0:
        raise PermissionError(ctypes.get_errno(), "private file systems need root; see the first lines of this file")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for path, size in sizes:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "megarl-faults", str(path)], check=True)


def fill(directory: Path, seconds: float) -> None:
    """Keep the file system of a directory full for some time."""
    path, end = directory / "filler", time.monotonic() + seconds
    with path.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                for size in (1 << 24, 1 << 12):
                    while file.write(bytes(size)) == size:
                        pass
            time.sleep(0.01)
    path.unlink()


if __name__ == "__main__":
    trace(int(sys.argv[1]))
