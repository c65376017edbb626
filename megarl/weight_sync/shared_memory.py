"""Slots of memory for buckets: files in /dev/shm or device memory, which a sender packs into and receivers of its host map.

A slot's file is unlinked once every receiver has mapped it. So the kernel frees the memory when the last process that maps
it ends, however it ends. Until then the sender locks the file, and a new sender deletes named files that are not locked.
Unlike a process id, a lock shows whether the owner is alive even where containers share the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import uuid
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch

from megarl.platform import Platform

_FILE_PREFIX = "megarl-weights-"


class SharedSlot:
    """Shared memory of the sender, which grows on demand."""

    def __init__(self, shm_dir: str) -> None:
        self._dir = shm_dir
        self._fd = -1
        self._size = 0
        self.path: str | None = None  # None once the file is unlinked
        self.name = ""  # of the file; a new one when the slot grows
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, size: int) -> torch.Tensor:
        """Return uint8 [size] in shared memory. Raises OSError, with needed and free bytes, if it does not fit."""
        if size > self._size:
            self.close()  # first: the new file may need the memory of the old one
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
            os.close(self._fd)  # another sender deleted it as stale before it was locked
        try:
            # Allocate pages now: with a sparse file the first access to a missing page would raise SIGBUS.
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            self.close()
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(errno.ENOSPC, _full(self._dir, size)) from error
        self._memory = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        self._size = size

    def handle(self) -> str:
        """Return the handle with which receivers open the slot."""
        return self.name

    def unlink(self) -> None:
        """Unlink the file, once every receiver has mapped it."""
        path, self.path = self.path, None
        if path is not None:
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._memory = -1, 0, torch.empty(0, dtype=torch.uint8, device="cpu")


class DeviceSlot:
    """Device memory of the sender, which receivers of its host map."""

    name = ""

    def __init__(self, platform: Platform) -> None:
        self._platform, self._shareable = platform, platform.shareable_memory(1)

    def reserve(self, size: int) -> torch.Tensor:
        """Return uint8 [size]. The slot may grow only before receivers have mapped it."""
        if size > len(self._shareable.memory):
            self._shareable.close()
            self._shareable = self._platform.shareable_memory(size)
        return self._shareable.memory[:size]

    def handle(self) -> dict[str, Any]:
        """Return a handle with which one receiver opens the slot once."""
        return self._shareable.handle()

    def unlink(self) -> None:
        """Do nothing: device memory has no file."""

    def close(self) -> None:
        self._shareable.close()


class PrivateSlot:
    """Private memory, for buckets that no receiver maps."""

    name = ""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> torch.Tensor:
        if size > len(self._memory):
            self.close()  # first: old and new memory may not fit together
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[:size]

    def unlink(self) -> None:
        """Do nothing: private memory has no file."""

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)


class MappedSlots:
    """A receiver's mappings of senders' slots. Each slot is mapped once."""

    def __init__(self, shm_dir: str) -> None:
        self._dir = shm_dir
        self._memories: dict[Hashable, tuple[str, torch.Tensor]] = {}

    def memory(self, slot: Hashable, name: str) -> torch.Tensor:
        """Return the memory (uint8) of a slot. `slot`: any key that identifies it; `name`: of its file."""
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
    """Delete slot files that a killed sender left behind and return their names."""
    removed = []
    for path in Path(shm_dir).glob(f"{_FILE_PREFIX}*"):
        # Skipped: just deleted, another user's, or its owner is alive.
        with (
            contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError),
            path.open("r+b") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
    return removed


def _full(shm_dir: str, needed: int) -> str:
    stat = os.statvfs(shm_dir)
    free = stat.f_bavail * stat.f_frsize
    return (
        f"{shm_dir} is full: a weight bucket needs {needed:,} bytes and {free:,} are free. Free some, enlarge it "
        f"(docker run --shm-size=..., or --ipc=host), lower weight_sync.bucket_mb, or set weight_sync.transport: collective"
    )
