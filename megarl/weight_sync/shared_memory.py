"""Memory that the sender packs into and receivers of its host map: files in /dev/shm, or the sender's device memory.

A slot's file has a name only until every receiver has mapped it; then it is unlinked, so its
memory goes with the last process that maps it, however that process ends. For the moment before,
the sender holds a lock on the file, and a new sender deletes named files whose lock is free. A lock
says what a process id cannot: whether the owner lives, also where containers share the directory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import uuid
from collections.abc import Hashable
from typing import Any

import torch

from megarl.platform import Platform

_FILE_PREFIX = "megarl-weights-"


class SharedSlot:
    """A growing piece of shared memory, owned by the sender."""

    def __init__(self, shm_dir: str) -> None:
        self._dir = shm_dir
        self._fd = -1
        self._size = 0
        self.path: str | None = None  # while receivers may still have to open it
        self.name = ""  # of the file; changes when the slot grows
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, size: int) -> torch.Tensor:
        """uint8 [size] in shared memory. Raises OSError with the arithmetic where it does not fit."""
        if size > self._size:
            self.close()  # first: the new file may need the old one's memory
            self._create(size)
        return self._memory[:size]

    def _create(self, size: int) -> None:
        while True:
            self.name = f"{_FILE_PREFIX}{uuid.uuid4().hex}"
            self.path = os.path.join(self._dir, self.name)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink > 0:
                break
            os.close(self._fd)  # a sweep took it for stale between these two calls
        try:
            # Pages are claimed now: a sparse file would end the process with SIGBUS on first touch.
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            self.close()
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(errno.ENOSPC, _full(self._dir, size)) from error
        self._memory = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        self._size = size

    def handle(self) -> str:
        """What a receiver opens it by."""
        return self.name

    def unlink(self) -> None:
        """Take the file's name away: everyone who needs it has mapped it."""
        if self.path is not None:
            os.unlink(self.path)
            self.path = None

    def close(self) -> None:
        self.unlink()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._memory = -1, 0, torch.empty(0, dtype=torch.uint8, device="cpu")


class DeviceSlot:
    """Memory of the sender's device, which receivers of its host map."""

    name = ""

    def __init__(self, platform: Platform) -> None:
        self._platform, self._shareable = platform, platform.shareable_memory(1)

    def reserve(self, size: int) -> torch.Tensor:
        """uint8 [size]. Grows before receivers have mapped it, and not after."""
        if size > len(self._shareable.memory):
            self._shareable.close()
            self._shareable = self._platform.shareable_memory(size)
        return self._shareable.memory[:size]

    def handle(self) -> dict[str, Any]:
        """What one receiver opens it by, once."""
        return self._shareable.handle()

    def unlink(self) -> None:
        """Nothing has a name."""

    def close(self) -> None:
        self._shareable.close()


class PrivateSlot:
    """Memory of this process, where no receiver maps the sender's."""

    name = ""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> torch.Tensor:
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[:size]

    def unlink(self) -> None:
        """Nothing has a name."""

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)


class MappedSlots:
    """The sender's slots as a receiver sees them: each is mapped once."""

    def __init__(self, shm_dir: str) -> None:
        self._dir = shm_dir
        self._memories: dict[Hashable, tuple[str, torch.Tensor]] = {}

    def memory(self, slot: Hashable, name: str) -> torch.Tensor:
        """uint8 memory of `slot`, a number among the sender's (and, of several senders, whose), whose file is called
        `name`."""
        if slot not in self._memories or self._memories[slot][0] != name:
            self._memories.pop(slot, None)
            fd = os.open(os.path.join(self._dir, name), os.O_RDWR | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
            self._memories[slot] = (name, torch.frombuffer(mapped, dtype=torch.uint8))
        return self._memories[slot][1]

    def close(self) -> None:
        self._memories.clear()


def remove_stale_files(shm_dir: str) -> list[str]:
    """Delete slot files that a killed sender left behind; returns their names."""
    removed = []
    for name in os.listdir(shm_dir):
        if not name.startswith(_FILE_PREFIX):
            continue
        path = os.path.join(shm_dir, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):  # just gone, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            removed.append(name)
        except (BlockingIOError, FileNotFoundError):  # its owner lives, or has just unlinked it
            continue
        finally:
            os.close(fd)
    return removed


def _full(shm_dir: str, needed: int) -> str:
    stat = os.statvfs(shm_dir)
    free = stat.f_bavail * stat.f_frsize
    return (
        f"{shm_dir} is full: a weight bucket needs {needed:,} bytes and {free:,} are free. Free some, enlarge it "
        f"(docker run --shm-size=..., or --ipc=host), lower exchange.bucket_mb, or set exchange.transport: collective"
    )
