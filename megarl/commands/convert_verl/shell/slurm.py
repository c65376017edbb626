"""Variables that Slurm sets in a script with ``#SBATCH`` lines."""

from __future__ import annotations

import re

from megarl.commands.convert_verl.shell.values import Fact, ShellVariable

_DIRECTIVE = re.compile(r"#SBATCH\s+(?:--([\w-]+)(?:[= ]\s*|$)|-([A-Za-z])\s*)(\S*)")
_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "J": "job-name"}
_COUNTS: dict[str, tuple[str, ...]] = {
    "nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
}
"""Option of sbatch with a number -> variables with the number. Source: sbatch(1), output environment variables."""
_GPUS = re.compile(r"(?:^|,)gpu(?::[A-Za-z][\w.-]*)?:(\d+)(?:$|[,(])")


def submitted_variables(text: str) -> dict[str, ShellVariable]:
    """Return the variables that sbatch sets from the script's ``#SBATCH`` lines, each with a note that names its line.

    Only lines before the first command count, as for sbatch. Ranges of nodes set nothing.
    """
    variables: dict[str, ShellVariable] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        if not (match := _DIRECTIVE.match(line)):
            continue
        option, value = match[1] or _SHORT.get(match[2], ""), match[3]
        names: tuple[str, ...]
        if option == "job-name":
            names, count = ("SLURM_JOB_NAME",), value.strip("\"'")
        else:
            names, count = _COUNTS.get(option, ()), _count(option, value)
        for name in names if count else ():
            note = f"line {number}: {name}={count}, as sbatch sets it from {line.strip()}"
            variables[name] = ShellVariable(count, frozenset({Fact(note)}))
    return variables


def _count(option: str, value: str) -> str:
    """Return the number of an option of sbatch, or "" for a form without one."""
    if option == "gres":
        match = _GPUS.search(value)
        return match[1] if match else ""
    number = value.rpartition(":")[2] if option == "gpus-per-node" else value  # a100:8
    return number if number.isdigit() else ""
