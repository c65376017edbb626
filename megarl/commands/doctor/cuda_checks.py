"""Checks of machines with NVIDIA GPUs: the driver and Transformer Engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.machine import Machine, Output
from megarl.commands.doctor.platform_detection import TorchSees, busy, platform_of, torch_sees
from megarl.platform.cuda_kind import CUDA, WITHOUT_TRANSFORMER_ENGINE
from megarl.platform.transformer_engine import attention_problem, installed, problem_of

_TE_SECONDS = 120.0
_TE_IMPORT = "import transformer_engine.pytorch"


@check(
    "nvidia",
    "`nvidia-smi`: the driver supports the CUDA version of torch; no other process uses device memory",
    seconds=70,
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
    text = f"driver {driver[1]} runs CUDA up to {runs[0]}.{runs[1]}, torch {sees.version} is built for {sees.cuda}"
    if built[0] > runs[0]:
        yield fail(text, f"update the driver, or install a torch for CUDA {runs[0]}")
    elif built > runs:
        yield warning(f"{text}: this mostly works within a major version", "update the driver if a kernel fails")
    else:
        yield ok(text)


@check(
    "transformer-engine",
    "all its packages have the same version, one that Megatron supports, match torch's CUDA and can be imported; it has the model's "
    "attention on this GPU",
    seconds=_TE_SECONDS + 15,
)
def transformer_engine(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if platform_of(machine, needs).kind is not CUDA or (needs.recipe and not needs.trains):
        return
    have = installed(machine.version)
    if "transformer-engine" not in have:
        yield warning(WITHOUT_TRANSFORMER_ENGINE, _TE_INSTALL)
        return
    whole = have["transformer-engine"]
    problem = problem_of(whole)
    if problem is not None:
        yield warning(problem, _TE_INSTALL)
    cores = [name for name in have if name.startswith("transformer-engine-cu")]
    if "transformer-engine-torch" not in have or not cores:
        lacking = "transformer-engine-torch" if cores else "transformer-engine-cu13"
        yield fail(
            f"transformer-engine {whole} without {lacking}: `import transformer_engine.pytorch` fails", _TE_INSTALL
        )
        return
    different = [f"{name} {version}" for name, version in have.items() if version != whole]
    if different:
        text = f"transformer-engine {whole} with {', '.join(different)}: all packages must have one version"
        yield fail(text, _TE_INSTALL)
        return
    sees = torch_sees(machine)
    major = (sees.cuda or "").split(".")[0]
    if major and f"transformer-engine-cu{major}" not in have:
        yield fail(
            f"{', '.join(cores)} does not match a torch for CUDA {sees.cuda}",
            f"pip install transformer-engine-cu{major}=={whole}",
        )
        return
    imported = machine.python_code(_TE_IMPORT, _TE_SECONDS)
    if not imported.good:
        yield fail(f"{_TE_IMPORT}: {imported.last_error}", f"build it against the installed torch: {_TE_INSTALL}")
        return
    unfit = None
    if needs.attention is not None and sees.capability is not None:
        unfit = attention_problem(needs.attention, sees.capability, machine.version("flash-attn"))
    if unfit is not None:
        yield fail(*unfit)
    elif problem is None:
        yield ok(f"Transformer Engine {whole}")


_TE_INSTALL = "pip install --no-build-isolation -r launch/requirements-cuda-te.txt (docs/cuda.md)"

CHECKS = (nvidia, transformer_engine)
