"""Limits of a process: memory, and open files.

The limit on memory counts private writable memory (RLIMIT_DATA) at allocation: a call that allocates too much gets a MemoryError, and
the machine never runs out of memory. RLIMIT_AS also counts reserved address space; numpy and thread pools reserve far more
than they use. Resident memory must be polled, and a poll comes too late.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

_MOST_OPEN_FILES = 1 << 20  # without a hard limit: some programs do something for each possible file


def limit_memory(megabytes: int | None) -> None:
    """Limit this process, and each process that it starts, to `megabytes` MiB each. None: no limit."""
    if megabytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


def check_memory(megabytes: int | None) -> None:
    """Raise ValueError if this process already uses the limit. Skipped where /proc is missing."""
    status = Path("/proc/self/status")
    if megabytes is None or not status.exists():
        return
    used = int(re.findall(r"VmData:\s*(\d+) kB", status.read_text())[0]) >> 10
    if used >= megabytes:
        raise ValueError(f"memory_mb is {megabytes}, but imports alone take {used} MiB: raise it")


def raise_open_files() -> None:
    """Raise this process's soft limit on open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
