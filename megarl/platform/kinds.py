"""Every kind of device, in the order in which they are preferred: a new one is a line here and files of its own.

Outside this package and the engines, nothing asks which of them a device is, but for what a `DeviceKind` says of it.
"""

from __future__ import annotations

from typing import Literal

from megarl.platform.cpu_kind import CPU
from megarl.platform.cuda_kind import CUDA
from megarl.platform.device_kind import DeviceKind
from megarl.platform.npu_kind import NPU

DeviceName = Literal["auto", "cpu", "cuda", "npu"]  # the values of cluster.device
KINDS: tuple[DeviceKind, ...] = (NPU, CUDA, CPU)


def kind_of(name: str) -> DeviceKind:
    """The kind called `name`. Raises ValueError for a name that there is not."""
    for kind in KINDS:
        if kind.name == name:
            return kind
    *names, last = sorted(["auto", *(kind.name for kind in KINDS)])
    raise ValueError(f"cluster.device is {name!r}; it must be {', '.join(names)} or {last}.")
