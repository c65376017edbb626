"""Memory of devices, and what moves the optimizer's states out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# GB of a device, of a 910C one of its two dies: taken as GiB, which is what libraries report of them, about.
DEVICES = {
    "910B": 64,  # https://docs.sglang.io/docs/hardware-platforms/ascend-npus/ascend_npu_reference
    "910C": 64,
    "A100": 80,  # the data sheet of each: https://www.nvidia.com/en-us/data-center/
    "H100": 80,
    "H200": 141,
}


def swapped_parts(extra: Mapping[str, Any]) -> int | None:
    """In how many parts MindSpeed's swap_optimizer of `megatron.extra` brings master weights and moments from the host to
    the device, where it is on. 16 is its default: docs/zh/features/swap-optimizer.md of MindSpeed's sources."""
    return int(extra.get("swap_optimizer_times", 16)) if extra.get("swap_optimizer") else None
