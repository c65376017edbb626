"""Ascend NPUs, as `DeviceKind` has them.

The sets of versions are those that vllm-ascend's versioning policy, MindSpeed's branches and verl's images for CANN
8.3.RC1, 9.0.0 and 9.1.0 agree on (read, not run). Dockerfile.npu builds each of them from launch/npu_versions/, which a test holds to this table.
"""

from __future__ import annotations

from megarl.checks.versions import BuiltAgainst, Displaced, VersionSet
from megarl.platform.device_kind import DeviceKind, PortRange

CANN, DRIVER = "CANN", "driver (HDK)"  # of a set's `system`

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
        "ray": "==2.60.0",
    },
    {CANN: "9.1.0", DRIVER: "26.0.rc1"},
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
        "ray": "==2.60.0",
    },
    {CANN: "9.0.0"},
    install="Dockerfile.npu with --build-arg CANN=9.0.0",
    remark="MindSpeed is a checkout of core_r0.16.0",
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
        "ray": "==2.60.0",
    },
    {CANN: "8.3.RC1"},
    install="Dockerfile.npu with --build-arg CANN=8.3.rc1",
    remark="it only evaluates: its vLLM cannot take weights, and megarl is written for Megatron 0.16",
)

NPU = DeviceKind(
    name="npu",
    plural="NPUs",
    implementation="megarl.platform.npu:NPUPlatform",
    sets=(_CANN_9_1, _CANN_9_0, _CANN_8_3),
    collective="HCCL",
    ray_resource="NPU",
    visible="ASCEND_RT_VISIBLE_DEVICES",
    files="/dev/davinci[0-9]*",
    package="torch_npu",
    distribution="torch-npu",
    torch_api="npu",
    present="torch_npu is installed",
    absent="torch_npu is not installed",
    install="install torch_npu (Dockerfile.npu)",
    checks="megarl.platform.npu_checks",
    built_against=(
        BuiltAgainst(
            "torch-npu",
            "torch",
            3,
            "torch_npu is built against one torch, and fails to load, or crashes, beside another",
        ),
        # Two numbers: a checkout of vllm-ascend's releases/v0.23.0 calls itself 0.23.1.dev.
        BuiltAgainst("vllm-ascend", "vllm", 2, "vllm-ascend overwrites parts of one vLLM"),
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
    many_files=True,
    status_command="npu-smi info",
    status_commands=(("npu-smi", "info"), ("npu-smi", "info", "-m"), ("npu-smi", "info", "-t", "topo")),
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
