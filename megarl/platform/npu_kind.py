"""DeviceKind of Ascend NPUs.

The version sets follow vllm-ascend's versioning policy and Dockerfiles, the table of CANN versions in torch_npu's wheels, and
verl's images for CANN 8.3.RC1, 8.5.1, 8.5.2, 9.0.0 and 9.1.0 (read, not run). Dockerfile.npu builds each set from launch/npu_versions/;
a test compares those files with this table.

Drivers, from CANN's release notes: 9.1.X works with HDK 25.2.X and later and not with 25.0.X, 9.0.X and 8.5.2 with 25.0.X and later
(hiascend.com/document, CANNCommunityEdition/910, releasenote/9.1.0, "CANN and Ascend HDK Version Compatibility"); 8.5.0 with 25.0.X and
later (canncommercial/850, releasenote_0000), and 8.5.1 with the drivers of 8.5.0 (MindIE 26.0.0's release notes). The driver
released with a CANN version is `required_soft` in ascend-deployer's CANN_<version>.json.
"""

from __future__ import annotations

from megarl.platform.device_kind import DeviceKind, PortRange
from megarl.platform.tracing import CONTENTS, Tracing
from megarl.platform.version_sets import BuiltAgainst, Displaced, VersionSet

# Keys of a set's `system`: the CANN version, the oldest driver that works with it, and the driver released with it.
CANN, DRIVER, RELEASED_WITH = "CANN", "driver (HDK), at least", "driver (HDK), released with"
SHARES_MEMORY = "25.3.rc1"  # the oldest driver with which verl lets processes share device memory (IPC)

_CANN_9_1 = VersionSet(
    "CANN 9.1.0",
    "npu",
    ("3.12",),
    {
        "torch": "==2.10.0",
        "torch-npu": "==2.10.0.post4",
        "transformers": "==5.10.4",
        "vllm": "==0.23.0",
        "vllm-ascend": "==0.23.*",
        "megatron-core": "==0.16.*",
        "mindspeed": "",
        "mbridge": "==0.15.1",
        "triton-ascend": "==3.2.2",
        "numpy": ">=2",
        "ray": "==2.60.0",
    },
    {CANN: "9.1.0", DRIVER: "25.2.0", RELEASED_WITH: "26.0.rc1"},
    install="the image that Dockerfile.npu builds",
    remark="the default; MindSpeed is a checkout of core_r0.16.0",
)
_CANN_9_0 = VersionSet(
    "CANN 9.0.0",
    "npu",
    ("3.11",),
    {
        "torch": "==2.9.0",
        "torch-npu": "==2.9.0.post2",
        "transformers": ">=4.57,<5",
        "vllm": "==0.18.0",
        "vllm-ascend": "==0.18.*",
        "megatron-core": "==0.16.*",
        "mindspeed": "",
        "mbridge": "==0.15.1",
        "triton-ascend": "==3.2.1",
        "numpy": "<2",
        "ray": "==2.60.0",
    },
    {CANN: "9.0.0", DRIVER: "25.0.rc1", RELEASED_WITH: "26.0.rc1"},
    install="Dockerfile.npu with --build-arg CANN=9.0.0",
    remark="vllm-ascend is the branch releases/v0.18.0, which moved to CANN 9.0.0 after the tag; MindSpeed is a checkout of core_r0.16.0",
)
_CANN_8_5 = VersionSet(
    "CANN 8.5.1",
    "npu",
    ("3.11",),
    {**_CANN_9_0.packages, "torch-npu": "==2.9.0", "triton-ascend": "==3.2.0"},
    {CANN: "8.5.1", DRIVER: "25.0.rc1", RELEASED_WITH: "25.5.0"},
    install="Dockerfile.npu with --build-arg CANN=8.5.1",
    remark="vllm-ascend is the tag v0.18.0; MindSpeed is a checkout of core_r0.16.0, as in verl's image for CANN 8.5.2",
)
_CANN_8_3 = VersionSet(
    "CANN 8.3.RC1",
    "npu",
    ("3.10", "3.11"),
    {
        "torch": "==2.7.1",
        "torch-npu": "==2.7.1",
        "transformers": "==4.57.6",
        "vllm": "==0.11.0",
        "vllm-ascend": "==0.11.0rc1",
        "megatron-core": "==0.12.1",
        "mindspeed": "",
        "mbridge": "==0.15.1",
        "triton-ascend": "==3.2.0rc4",
        "numpy": "<2",
        "ray": "==2.60.0",
    },
    {CANN: "8.3.RC1", RELEASED_WITH: "25.3.rc1"},
    install="Dockerfile.npu with --build-arg CANN=8.3.rc1",
    remark="for evaluation only: its vLLM cannot receive weights, and megarl needs Megatron 0.16",
)

# Names of torch_npu.profiler, equal in 2.7.1, 2.9.0, 2.9.0.post2 and 2.10.0.post4 (profiler/experimental_config.py).
_TRACING = Tracing(
    contents=CONTENTS,
    levels=("level_none", "level0", "level1", "level2"),
    metrics=(
        "PipeUtilization",
        "ArithmeticUtilization",
        "Memory",
        "MemoryL0",
        "MemoryUB",
        "ResourceConflictRatio",
        "L2Cache",
        "MemoryAccess",
    ),
    exports=("text", "db"),
    levels_of_metrics=("level1", "level2"),
    level_of_marks="level_none",
    marks=True,
    analysis=True,
    engines="vllm-ascend always traces its engines at level1 with PipeUtilization and text export, regardless of observe.profile_level, profile_metrics and profile_export",
)

NPU = DeviceKind(
    name="npu",
    plural="NPUs",
    no_host_optimizer=(
        "Megatron's HybridDeviceOptimizer moves only CUDA tensors",
        "set megatron.extra.swap_optimizer: true, so that MindSpeed keeps the states on the host",
    ),
    implementation="megarl.platform.npu:NPUPlatform",
    sets=(_CANN_9_1, _CANN_9_0, _CANN_8_5, _CANN_8_3),
    collective="HCCL",
    flight_recorder="torch_npu._C._distributed_c10d._dump_hccl_trace_json",  # torch_npu/csrc/distributed/Init.cpp
    tracing=_TRACING,
    ray_resource="NPU",
    visible="ASCEND_RT_VISIBLE_DEVICES",
    files="/dev/davinci[0-9]*",
    package="torch_npu",
    distribution="torch-npu",
    torch_api="npu",
    present="torch_npu is installed",
    absent="torch_npu is not installed",
    install="install torch_npu (Dockerfile.npu)",
    # The wheels of PyPI are for GPUs: sglang 0.5.23 would replace torch by 2.14.1.
    install_sglang="build SGLang 0.5.23 or later from source for NPUs, not from PyPI, with sgl-kernel-npu (docs/ascend.md)",
    install_memory_saver="build the torch_memory_saver of github.com/sgl-project/sgl-kernel-npu (build.sh -a memory-saver)",
    checks="megarl.commands.doctor.npu_checks",
    built_against=(
        BuiltAgainst(
            "torch-npu",
            "torch",
            3,
            "torch_npu is built against one torch version, and crashes or fails to load with another",
        ),
        # Two numbers: a checkout of vllm-ascend's releases/v0.23.0 has version 0.23.1.dev.
        BuiltAgainst("vllm-ascend", "vllm", 2, "vllm-ascend overwrites parts of one vLLM version"),
    ),
    displaced=(
        Displaced(
            "triton",
            "triton-ascend",
            "both install the module triton, and vllm-ascend's kernels then call the wrong one",
        ),
    ),
    interface_variables={"HCCL_SOCKET_IFNAME": False, "TP_SOCKET_IFNAME": True},
    # Trainer and engine share a device when colocated: without ranges both bind HCCL's default port.
    port_ranges=(
        PortRange("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050", on_host=True),
        PortRange("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050", on_host=False),
    ),
    port_error="EJ0003",
    buffer_variable="HCCL_BUFFSIZE",
    sleep_keeps_weights=True,
    many_files=True,
    status_command="npu-smi info",
    status_commands=(("npu-smi", "info"), ("npu-smi", "info", "-m"), ("npu-smi", "info", "-t", "topo")),
    device_commands=tuple(
        ("hccn_tool", "-i", "{device}", f"-{name}", "-g")
        for name in ("ip", "link", "tls", "net_health", "optical", "stat")
    ),
    logs=("~/ascend/log/debug/plog/*.log", "~/ascend/log/run/plog/*.log", "/var/log/npu/slog/*/*.log"),
    environment=(
        "ASCEND_",
        "ATB_",
        "CANN_",
        "CLOSE_MATMUL_",
        "CPU_AFFINITY_",
        "HCCL_",
        "LCCL_",
        "NPU_",
        "TASK_QUEUE_",
        "TP_SOCKET_",
    ),
    pass_in="Dockerfile.npu's head",
    import_remedy=(
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh and nnal/atb/set_env.sh first; see the lines on CANN"
    ),
)
