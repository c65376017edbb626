"""Folder with a keeper's address in the temporary directory, and removal of stale folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.atomic_files import write_atomically
from megarl.cluster.base import host_name
from megarl.cluster.sigstop_watch import start_time

_PREFIX = "megarl-keeper-"
_OWNER = "owner.json"  # host, PID namespace, and [process id, start time] of the processes that use the folder


class KeeperFolder:
    """A new folder, which only this user can open. It is stale once this process and the keeper have ended."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.set_owners(os.getpid())

    def set_owners(self, *pids: int) -> None:
        """Record the processes `pids` of this machine as the users of the folder, in place of earlier ones."""
        owner = {**_here(), "processes": [[pid, start_time(pid)] for pid in pids]}
        write_atomically(self.path / _OWNER, json.dumps(owner).encode())

    def remove(self) -> None:
        """Remove the folder. Safe to call repeatedly."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)


def remove_stale_folders() -> list[Path]:
    """Remove this user's stale folders, as a SIGKILL leaves them. Returns their paths.

    Only folders of this host and PID namespace count: process ids of others say nothing here.
    """
    stale = [path for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")) if _is_stale(path)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)  # another start may remove it at the same time; links are refused
    return [path for path in stale if not path.exists()]


def stale_text(paths: Sequence[Path]) -> str:
    """Return one line about removed folders."""
    text = "megarl: removed folders of killed keepers (train.keep_workers):"
    return f"{text} {', '.join(map(str, paths))}"


def _here() -> dict[str, Any]:
    return {"host": host_name(), "namespace": os.readlink("/proc/self/ns/pid")}


def _is_stale(path: Path) -> bool:
    try:
        if path.lstat().st_uid != os.getuid():
            return False
        owner = json.loads((path / _OWNER).read_text())
        processes = [(int(pid), int(started)) for pid, started in owner["processes"]]
    except (OSError, ValueError, KeyError, TypeError):  # it is being made, or another program's
        return False
    is_here = {name: owner.get(name) for name in ("host", "namespace")} == _here()
    return is_here and not any(started and start_time(pid) == started for pid, started in processes)
