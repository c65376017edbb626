"""What a device can do at most: dense bf16 matrix products in FLOP/s, which MFU is a share of."""

from __future__ import annotations

import re

# Words of the device's name -> FLOP/s. The first that fits counts, so longer names come first.
_NVIDIA = {  # the data sheet of each, without sparsity: https://www.nvidia.com/en-us/data-center/
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
}

# Ascend: cube cores x 16 x 16 x 16 products x 2 x clock, from CANN's platform_config/<name>.ini; the sums are those that
# MindStudio's performance model (https://gitcode.com/Ascend/msmodeling, tensor_cast/device.py) has for bf16. What is
# advertised (376, 313, 280 T) is for fp16. An A3 package (910C) is two devices to torch: these are of one.
_CUBE = 16**3 * 2
_ASCEND = {
    "Ascend910B1": 24 * _CUBE * 1.85e9,
    "Ascend910B2": 24 * _CUBE * 1.80e9,
    "Ascend910B3": 20 * _CUBE * 1.80e9,
    "Ascend910B4": 20 * _CUBE * 1.50e9,
    "Ascend910_9391": 24 * _CUBE * 1.80e9,
    "Ascend910_9392": 24 * _CUBE * 1.80e9,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name that torch has for it; None for one that is not in the table."""
    for name, peak in {**_NVIDIA, **_ASCEND}.items():
        if re.search(rf"\b{name}\b", device_name):
            return peak
    return None
