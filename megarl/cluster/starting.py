"""Processes that start and have not reported their process id yet: found on their machine by a mark in their environment.

Ray launches a process for a reserved device, and names it only once it has replied. A process that is stopped (SIGSTOP), hangs or
is killed before its reply would be known by its role alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.base import host_name
from megarl.cluster.sigstop_watch import process_fields, start_time

VARIABLE = "MEGARL_PROCESS"


@dataclass(frozen=True)
class StartingProcess:
    """A process before its first reply. state: in /proc/PID/stat. log: file that receives its stderr; "" for a pipe or terminal."""

    host: str
    pid: int
    state: str
    log: str


def new_mark() -> str:
    """Return a mark for one start of a process: the value of `VARIABLE` in its environment."""
    return uuid.uuid4().hex


def find_starting(marks: Collection[str]) -> dict[str, StartingProcess]:
    """Return the processes of this user on this machine that have one of the `marks`, by mark. Of a process and its children,
    the one that started first.

    Ray's launcher has the variables of its process as an argument before it has them in its environment. A process that rewrites its
    title over its environment would not be found. Ray's workers keep it (`tests/cluster/test_start_watch.py`).
    """
    found: dict[str, tuple[int, StartingProcess]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid == os.getpid() or (mark := _mark_of(folder, marks)) is None:
            continue
        started, fields = start_time(pid), process_fields(pid)
        if started and fields and (mark not in found or started < found[mark][0]):
            found[mark] = started, StartingProcess(host_name(), pid, fields[0], _log_of(folder))
    return {mark: process for mark, (_, process) in found.items()}


def kill_starting(mark: str) -> None:
    """Kill the process of this machine with this mark, if there is one."""
    for process in find_starting([mark]).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _mark_of(folder: Path, marks: Collection[str]) -> str | None:
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
        arguments = (folder / "cmdline").read_bytes()
    except OSError:  # the process has ended or belongs to another user
        return None
    for mark in marks:
        if f"{VARIABLE}={mark}".encode() in variables or mark.encode() in arguments:
            return mark
    return None


def _log_of(folder: Path) -> str:
    try:
        target = os.readlink(folder / "fd" / "2")
    except OSError:  # it has ended, or belongs to another user
        return ""
    return target if target.startswith("/") and Path(target).is_file() else ""
