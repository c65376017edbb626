"""Resource usage of a sandbox's processes, read from /proc outside the sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterator

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and all its descendants; ended processes have no descendants."""
    yield pid
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        for child in _read(f"/proc/{pid}/task/{thread}/children").split():
            yield from tree(int(child))


def cpu_and_memory(pid: int) -> tuple[float, int]:
    """Return CPU seconds (including reaped children) and resident bytes of a process and its descendants.

    Shared memory, for instance after a fork, counts in each process.
    """
    ticks = pages = 0
    for process in tree(pid):
        numbers = stat(process)
        if numbers:
            ticks += sum(numbers[11:15])  # utime, stime, cutime, cstime: proc(5)
            pages += numbers[21]
    return ticks / TICKS, pages * PAGE


def stat(pid: int) -> list[int]:
    """Return the numbers of /proc/PID/stat from the third field on, the state as 0; empty if the process has ended."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return [0, *map(int, fields[1:])] if fields else []


def parent(pid: int) -> int | None:
    numbers = stat(pid)
    return numbers[1] if numbers else None


def sees(pid: int, path: str) -> bool:
    """Return True if `path` exists for process `pid`. Raises PermissionError if this process is not allowed to look."""
    try:
        os.stat(f"/proc/{pid}/root{path}")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def files(pid: int, folder: str) -> int:
    """Return the number of files and folders on the file system at `folder` of process `pid`; 0 if it has ended."""
    try:
        space = os.statvfs(f"/proc/{pid}/root{folder}")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return space.f_files - space.f_ffree


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""
