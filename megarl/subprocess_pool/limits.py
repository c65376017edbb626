"""Memory limit of a process.

The limit counts private writable memory (RLIMIT_DATA) at allocation: a call that allocates too much gets a MemoryError, and
the machine never runs out of memory. RLIMIT_AS also counts reserved address space; numpy and thread pools reserve far more
than they use. Resident memory must be polled, and a poll comes too late.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path


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
