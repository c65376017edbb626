"""What a machine with NVIDIA GPUs needs beside Python packages: a driver that answers, and is new enough."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.checks.check import check
from megarl.checks.finding import Finding, Needs, fail, ok, warning
from megarl.checks.machine import Machine, Output
from megarl.platform.cuda_kind import CUDA
from megarl.platform.found import TorchSees, busy, platform_of, torch_sees


@check(
    "nvidia", "`nvidia-smi`: the driver against the CUDA that torch was built for; memory that others hold", seconds=70
)
def nvidia(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if platform_of(machine, needs).kind is not CUDA and not machine.glob(CUDA.files):
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


CHECKS = (nvidia,)
