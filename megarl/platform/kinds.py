"""All device kinds, in order of preference (`KINDS`), what a new one needs, and the values of `cluster.device` (`DeviceName`).

A new device kind needs:

- a pair of files like cuda.py (a `Platform`: calls in processes) and cuda_kind.py (a `DeviceKind`: plain values);
- its kind in `KINDS`, and its name in `DeviceName`;
- its devices in devices.yaml, and its machines in `DEVICES_OF` of device_table.py;
- its arguments in `engines/vllm/args.py` and `engines/sglang/args.py`;
- for a library that adapts Megatron to it, like MindSpeed: a folder like mindspeed/, and a case in adaptor.py;
- for `megarl doctor`: a module of checks, named in `DeviceKind.checks`, such as `commands/doctor/cuda_checks.py`;
- its packages in setup.cfg and in launch/.

Other code reads the fields of a `DeviceKind` and calls its `Platform`. It names no device.
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
