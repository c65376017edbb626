"""The platform, and its devices: those in /dev, those that torch sees, those that are taken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.doctor.check import check
from megarl.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.doctor.machine import Machine, Output, once

VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
DEVICE_FILES = {"npu": "/dev/davinci[0-9]*", "cuda": "/dev/nvidia[0-9]*"}
BUSY_SHARE = 0.1  # of a device's memory; an idle NPU's own is 5 %
_TORCH_SECONDS = 60.0

# As megarl.platform.select decides, in a process of its own: importing torch may crash where a driver is broken.
_ASK_TORCH = """
import importlib.util, json, torch
if importlib.util.find_spec("torch_npu") is not None:
    import torch_npu
    kind, api = "npu", torch.npu
else:
    kind, api = ("cuda", torch.cuda) if torch.cuda.is_available() else ("cpu", None)
names = [api.get_device_name(number) for number in range(api.device_count())] if api else []
print("\\n" + json.dumps({"kind": kind, "names": names, "version": torch.__version__, "cuda": torch.version.cuda}))
"""


@dataclass(frozen=True)
class Platform:
    """`device`: "npu", "cuda" or "cpu"; `why`: in words."""

    device: str
    why: str


@dataclass(frozen=True)
class TorchSees:
    """`error`: why torch could not say; else what it found."""

    error: str = ""
    kind: str = "cpu"
    names: tuple[str, ...] = ()
    version: str = ""
    cuda: str | None = None  # that it was built for


@once
def torch_sees(machine: Machine) -> TorchSees:
    output = machine.python_code(_ASK_TORCH, _TORCH_SECONDS)
    if not output.good:
        return TorchSees(error=output.last_error)
    said = json.loads(output.text.strip().splitlines()[-1])
    return TorchSees("", said["kind"], tuple(said["names"]), said["version"], said["cuda"])


def platform_of(machine: Machine, needs: Needs) -> Platform:
    """What megarl would run on: as megarl.platform.select, NPU before CUDA before CPU, without importing torch here."""
    if needs.device != "auto":
        return Platform(needs.device, f"cluster.device is {needs.device}")
    if machine.version("torch-npu") is not None:
        return Platform("npu", "torch_npu is installed")
    if machine.version("torch") is None:
        present = next((kind for kind, files in DEVICE_FILES.items() if machine.glob(files)), "cpu")
        return Platform(present, "torch is not installed; by the files in /dev")
    if torch_sees(machine).kind == "cuda":
        return Platform("cuda", "torch.cuda.is_available()")
    return Platform("cpu", "torch_npu is not installed, and torch sees no GPU")


@check(
    "platform", "which of npu, cuda, cpu megarl takes, and why; devices in /dev that it would leave idle", seconds=70
)
def platform(machine: Machine, needs: Needs) -> Iterator[Finding]:
    chosen = platform_of(machine, needs)
    sees = torch_sees(machine) if machine.version("torch") else TorchSees()
    if sees.error:
        yield fail(f"{chosen.device}, and `import torch` fails: {sees.error}", _remedy_of_import(chosen.device))
        return
    idle = [f"{len(files)} of {pattern}" for kind, pattern in DEVICE_FILES.items() if (files := machine.glob(pattern)) and kind != chosen.device]  # fmt: skip
    if needs.device in ("npu", "cuda") and sees.kind != needs.device:
        lacks = "torch_npu is not installed" if needs.device == "npu" else "torch.cuda.is_available() is False"
        yield fail(f"{chosen.why}, and {lacks}", f"install the {needs.device} build, or set cluster.device=auto")
    elif idle and needs.device == "auto":
        remedy = (
            "install torch_npu (Dockerfile.npu), or a CUDA build of torch; if the CPU is meant, set cluster.device=cpu"
        )
        yield warning(f"{chosen.device} ({chosen.why}), with {' and '.join(idle)} left idle", remedy)
    else:
        yield ok(f"{chosen.device}: {chosen.why}")


def _remedy_of_import(device: str) -> str:
    if device == "npu":
        return "source /usr/local/Ascend/ascend-toolkit/set_env.sh and nnal/atb/set_env.sh first; see the lines on CANN"
    return "install torch again, from the index for this machine"


@check(
    "devices", "how many there are, which of them *_VISIBLE_DEVICES lets through, which are taken by others", seconds=70
)
def devices(machine: Machine, needs: Needs) -> Iterator[Finding]:
    device = platform_of(machine, needs).device
    if device == "cpu":
        yield ok(f"{machine.cores()} CPU cores" + (f" for {needs.processes} processes" if needs.processes else ""))
        return
    sees, variable = torch_sees(machine), VISIBLE[device]
    if sees.error:
        yield fail(f"torch cannot say how many: {sees.error}", "see the line on the platform")
        return
    if sees.kind != device:  # the check above says it
        return
    files = machine.glob(DEVICE_FILES[device])
    limit = machine.environ.get(variable)
    if not sees.names:
        said = f"{variable}={limit!r}" if limit is not None else f"{variable} is not set"
        remedy = (
            f"correct or unset {variable}; in a container, pass the devices in (Dockerfile.npu's head, or --gpus all)"
        )
        yield fail(f"torch sees none; {len(files)} are in /dev, {said}", remedy)
        return
    wrong = _impossible(limit, len(files))
    if wrong:
        yield fail(f"{variable}={limit}, {wrong}", f"name devices of 0 to {len(files) - 1}, or unset it")
    else:
        hidden = f", of {len(files)} in /dev ({variable}={limit})" if limit is not None else ""
        yield ok(f"{len(sees.names)} x {sees.names[0]}{hidden}")


def _impossible(limit: str | None, present: int) -> str:
    """What is wrong with a list of devices by number; "" with none, and with one by name (GPU-..., MIG-...)."""
    if limit is None or not present or not re.fullmatch(r"[\d,\s]+", limit):
        return ""
    numbers = [int(number) for number in limit.replace(" ", "").split(",") if number]
    if len(set(numbers)) < len(numbers):
        return "which names one of them twice"
    absent = [number for number in numbers if number >= present]
    return f"and there are {present} devices" if absent else ""


@check(
    "nvidia", "`nvidia-smi`: the driver against the CUDA that torch was built for; memory that others hold", seconds=70
)
def nvidia(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if platform_of(machine, needs).device != "cuda" and not machine.glob(DEVICE_FILES["cuda"]):
        return
    head, table = (machine.run(command) for command in (["nvidia-smi"], _NVIDIA_TABLE))
    if head is None or table is None:
        yield warning("nvidia-smi is not installed", "in a container: --gpus all, with the NVIDIA container toolkit")
        return
    if not (head.good and table.good):
        bad = table if head.good else head
        yield fail(f"nvidia-smi: {bad.last_error}", "the driver does not answer: load it, or restart the machine")
        return
    yield from _nvidia_driver(head, torch_sees(machine))
    rows = [[cell.strip() for cell in line.split(",")] for line in table.text.splitlines() if line.strip()]
    yield from busy({row[0]: (float(row[1]), float(row[2])) for row in rows if row[1].replace(".", "").isdigit()})


_NVIDIA_TABLE = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]


def _nvidia_driver(head: Output, sees: TorchSees) -> Iterator[Finding]:
    driver = re.search(r"Driver Version:\s*([\d.]+)", head.text)
    newest = re.search(r"CUDA(?: \w+)? Version:\s*(\d+)\.(\d+)", head.text)
    if sees.error or not sees.cuda or not driver or not newest:
        return
    runs, built = (int(newest[1]), int(newest[2])), tuple(map(int, sees.cuda.split(".")[:2]))
    said = f"driver {driver[1]} runs CUDA up to {runs[0]}.{runs[1]}, torch {sees.version} is built for {sees.cuda}"
    if built[0] > runs[0]:
        yield fail(said, f"update the driver, or install a torch for CUDA {runs[0]}")
    elif built > runs:
        yield warning(f"{said}: within a major version that mostly works", "update the driver if a kernel is refused")
    else:
        yield ok(said)


def busy(memory: dict[str, tuple[float, float]]) -> Iterator[Finding]:
    """memory: MiB taken and in all, by the device's number."""
    taken = [
        f"{number} ({used / 1024:.0f} of {total / 1024:.0f} GiB)"
        for number, (used, total) in memory.items()
        if total and used > BUSY_SHARE * total
    ]
    if taken:
        yield warning(
            f"memory of devices that somebody holds: {', '.join(taken)}",
            "engines measure what is free when they load: end what runs there (npu-smi info, nvidia-smi), or leave these out",
        )
