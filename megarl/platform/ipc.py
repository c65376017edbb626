"""Device memory that other processes of the machine can map, without a name in /dev/shm.

torch describes device memory by eight values (torch/multiprocessing/reductions.py: reduce_tensor, and
torch_npu/multiprocessing/reductions.py): device, handle of the allocation, size and offset of the storage, reference count
and event. All except the device are sent as JSON; torch would pickle them. A reader maps the memory through its own device,
because the owner's device may be invisible to it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megarl.platform.installed import LateModule

if TYPE_CHECKING:
    import torch
else:  # the platform of CPUs needs this module, and no torch in the controller
    torch = LateModule("torch")

# In the variable of torch's allocator.
EXPANDABLE_SEGMENTS = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class DeviceMemory:
    """Memory of a device that other processes of the machine can map, with handles from torch's storage."""

    def __init__(self, memory: torch.Tensor, describe: str) -> None:
        """`memory`: a whole allocation. `describe`: name of the method of torch's storage that creates a handle."""
        self.memory, self._describe = memory, describe

    def handle(self) -> dict[str, Any]:
        """Create a handle, as JSON. Each reader needs a new handle and opens it once."""
        storage = self.memory.untyped_storage()
        if not hasattr(storage, self._describe):
            raise RuntimeError(
                f"the installed torch for {self.memory.device.type} cannot share device memory between processes (it has no "
                f"{self._describe}); set weight_sync.transport=auto"
            )
        # torch counts references per reader, so each reader needs a separate call.
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
        """Release the memory after all readers have closed theirs."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.memory.device)


def open_device_memory(handle: dict[str, Any], device: torch.device, rebuild: str) -> torch.Tensor:
    """Map the memory of a `DeviceMemory.handle` through `device`: uint8 [size].

    rebuild: name of the method of torch's storage class that opens a handle.
    Raises RuntimeError if the devices or the container do not allow this process to map it.
    """
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
    """Disable expandable segments within the block, so that any process of the same user can open the handles.

    The handle of an expandable segment is a file descriptor, and most containers do not allow another process to duplicate
    it ("pidfd_getfd: Operation not permitted", https://github.com/pytorch/pytorch/issues/165685). While they are disabled,
    torch's allocator does not reuse expandable segments (c10/cuda/CUDACachingAllocator.cpp: get_free_block).

    variable: the platform's variable, which its allocator prefers to PYTORCH_ALLOC_CONF. change: sets the allocator's
    settings. whole: `change` resets all settings that are absent from its argument (c10/core/AllocatorConfig.cpp:
    parseArgs), so it receives all of them; otherwise it accepts only expandable_segments.
    """
    settings = os.environ.get(variable, os.environ.get("PYTORCH_ALLOC_CONF", ""))
    setting = EXPANDABLE_SEGMENTS.search(settings)
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
    """Memory of an unnamed file, freed with the last process that maps it: the CPU's counterpart of device memory."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes. Raises OSError if the machine has too little memory."""
        self._descriptor = os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
        try:
            # Allocate the pages now: with a sparse file, the first access could end the process with SIGBUS.
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise OSError(
                error.errno, f"no memory for a weight bucket of {size:,} bytes; lower weight_sync.bucket_mb"
            ) from error
        self.memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def handle(self) -> dict[str, Any]:
        return {"process": os.getpid(), "descriptor": self._descriptor, "size": len(self.memory)}

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.memory = -1, torch.empty(0, dtype=torch.uint8, device="cpu")


def open_host_memory(handle: dict[str, Any]) -> torch.Tensor:
    """Map the memory of a `HostMemory.handle`: uint8 [size].

    Raises OSError if the owning process has ended or belongs to another user.
    """
    descriptor = os.open(f"/proc/{handle['process']}/fd/{handle['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, handle["size"]), dtype=torch.uint8)
    finally:
        os.close(descriptor)
