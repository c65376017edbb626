"""All device kinds, in order of preference. A new kind needs an entry here and a pair of files like cuda.py, cuda_kind.py.

It also needs its name in `DeviceName`, rows in devices.yaml, and its arguments in `engines/vllm/args.py` and
`engines/sglang/args.py`. Other code reads the fields of a `DeviceKind`.
"""

from __future__ import annotations

from typing import Literal

from megarl.platform.cpu_kind import CPU
from megarl.platform.cuda_kind import CUDA
from megarl.platform.device_kind import DeviceKind
from megarl.platform.npu_kind import NPU

DeviceName = Literal["auto", "cpu", "cuda", "npu"]  # the values of cluster.device
KINDS: tuple[DeviceKind, ...] = (NPU, CUDA, CPU)


def is_accelerator(device: str) -> bool:
    """Return whether `device`, a value of cluster.device, is an accelerator; "auto" is planned as an accelerator."""
    return device == "auto" or kind_of(device).accelerator


def kind_of(name: str) -> DeviceKind:
    """Return the device kind `name`. Raises ValueError for an unknown name."""
    for kind in KINDS:
        if kind.name == name:
            return kind
    *names, last = sorted(["auto", *(kind.name for kind in KINDS)])
    raise ValueError(f"cluster.device is {name!r}; it must be {', '.join(names)} or {last}.")
