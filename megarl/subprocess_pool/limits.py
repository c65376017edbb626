"""How much memory a process may have.

What counts is memory of its own that it may write to (RLIMIT_DATA), as it is allocated: the call that asks for too much has
a MemoryError, and the machine is never short of it. RLIMIT_AS would count address space, too, of which numpy and thread
pools reserve far more than they use; resident memory would have to be watched, and be seen too late.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path


def limit_memory(megabytes: int | None) -> None:
    """Hold this process, and each that it starts, to so many MiB. None: to no limit."""
    if megabytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


def check_memory(megabytes: int | None) -> None:
    """Raises ValueError where this process has as much already. Does nothing off Linux, where it is not told."""
    status = Path("/proc/self/status")
    if megabytes is None or not status.exists():
        return
    used = int(re.findall(r"VmData:\s*(\d+) kB", status.read_text())[0]) >> 10
    if used >= megabytes:
        raise ValueError(f"memory_mb is {megabytes}, and {used} MiB are taken as soon as all is imported: allow more")
