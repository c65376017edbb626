"""Memory of one process's device that other processes of the machine map, without a name in /dev/shm.

torch describes device memory to another process by eight values (torch/multiprocessing/reductions.py: reduce_tensor, and
torch_npu/multiprocessing/reductions.py): a device, the allocation's handle, the storage's size and place in it, a reference
count, and an event. All but the device travel as JSON, where torch itself would pickle them. A reader maps the memory from its
own device, whichever the owner's is: that one may be invisible to the reader.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Shareable(Protocol):
    """Memory of this process that others of the machine can map."""

    memory: torch.Tensor  # uint8 [size]

    def handle(self) -> dict[str, Any]:
        """Describe the memory to one reader, as JSON. A handle is for one reader and is opened once."""
        ...

    def close(self) -> None:
        """Give the memory back, once readers have closed theirs."""
        ...


class DeviceMemory:
    """Device memory, described by torch's storage."""

    def __init__(self, memory: torch.Tensor, describe: str) -> None:
        """`memory`: a whole allocation. `describe`: the method of torch's storage that makes a handle."""
        self.memory, self._describe = memory, describe

    def handle(self) -> dict[str, Any]:
        storage = self.memory.untyped_storage()
        if not hasattr(storage, self._describe):
            raise RuntimeError(
                f"this version of {self.memory.device.type}'s torch library shares no device memory between processes (it has no "
                f"{self._describe}); set exchange.transport=auto"
            )
        # torch counts readers: each needs a reference count of its own, and so a call.
        _, handle, size, offset, count, count_offset, event, waits = getattr(storage, self._describe)()
        return {
            "handle": handle.hex(),
            "size": size,
            "offset": offset,
            "count": count.hex(),
            "count_offset": count_offset,
            "event": event.hex(),
            "waits": waits,
        }

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.memory.device)


def open_device_memory(handle: dict[str, Any], device: torch.device, rebuild: str) -> torch.Tensor:
    """Map what `DeviceMemory.handle` describes, for `device`: uint8 [size]. `rebuild`: the method of torch's storage class.

    Raises RuntimeError where the devices or the container do not let this process map it."""
    storage = getattr(torch.UntypedStorage, rebuild)(
        device.index,
        bytes.fromhex(handle["handle"]),
        handle["size"],
        handle["offset"],
        bytes.fromhex(handle["count"]),
        handle["count_offset"],
        bytes.fromhex(handle["event"]),
        handle["waits"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextlib.contextmanager
def without_expandable_segments(variable: str, change: Callable[[str], None], *, whole: bool) -> Iterator[None]:
    """Allocate inside in segments of fixed size, whose handle any process of the same user can open.

    The handle of a segment that grows is a file descriptor, which most containers let no other process take ("pidfd_getfd:
    Operation not permitted", https://github.com/pytorch/pytorch/issues/165685). torch's allocator does not reuse a growing
    segment while they are off (c10/cuda/CUDACachingAllocator.cpp: get_free_block). `variable` is the platform's, which comes
    before PYTORCH_ALLOC_CONF in its allocator; `change` sets the allocator's settings. `whole`: it resets settings that it is
    not given (c10/core/AllocatorConfig.cpp: parseArgs), so it gets all of them; else expandable_segments alone.
    """
    settings = os.environ.get(variable, os.environ.get("PYTORCH_ALLOC_CONF", ""))
    setting = re.search(r"expandable_segments\s*:\s*true", settings, re.IGNORECASE)
    if setting is None:
        yield
        return
    off = "expandable_segments:False"
    change(settings.replace(setting[0], off) if whole else off)
    try:
        yield
    finally:
        change(settings if whole else setting[0])


class HostMemory:
    """Memory of a file without a name, which ends with the last process that maps it: what a CPU has for device memory."""

    def __init__(self, size: int) -> None:
        """Raises OSError where the machine has not so much memory left."""
        self._descriptor = os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
        try:
            # Pages are claimed now: a sparse file would end the process with SIGBUS on first touch.
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise OSError(
                error.errno, f"no memory for a weight bucket of {size:,} bytes; lower exchange.bucket_mb"
            ) from error
        self.memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def handle(self) -> dict[str, Any]:
        return {"process": os.getpid(), "descriptor": self._descriptor, "size": len(self.memory)}

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.memory = -1, torch.empty(0, dtype=torch.uint8, device="cpu")


def open_host_memory(handle: dict[str, Any]) -> torch.Tensor:
    """Map what `HostMemory.handle` describes: uint8 [size]. Raises OSError where its process is gone or another user's."""
    descriptor = os.open(f"/proc/{handle['process']}/fd/{handle['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, handle["size"]), dtype=torch.uint8)
    finally:
        os.close(descriptor)
