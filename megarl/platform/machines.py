"""Devices and host memory of the machines that recipes' heads name."""

from __future__ import annotations

# Machines with GPUs are named by these: SXM devices of NVIDIA's data sheets.
# https://www.hiascend.com/hardware: each of an Atlas 800T A3's devices is one die of a 910C.
DEVICES_OF = {
    "Atlas 200T A2 Box16": "910B",
    "Atlas 800T A2": "910B",
    "Atlas 900 A2 PODc": "910B",
    "Atlas 800T A3": "910C",
    "A100": "A100",
    "H100": "H100",
    "H200": "H200",
}

# GiB, where a machine has another size than devices.yaml takes for its device. Assumed, as the table's: 128 GiB a device.
HOST_MEMORY_OF = {"Atlas 200T A2 Box16": 2048.0}
