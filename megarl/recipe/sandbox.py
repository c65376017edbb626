"""The recipe's section `sandbox`: limits of programs from the policy. The defaults equal `megarl.sandbox.base.Limits`."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.recipe.key import key
from megarl.sandbox.base import Limits


@dataclass
class SandboxConfig:
    """Limits of a run of a program that the policy wrote: a test of the scorers `code` and `code_all`, or a call of
    the tool `code_interpreter`; see docs/sandbox.md."""

    cpu_seconds: float = key(
        Limits.cpu_seconds, "CPU time limit of all processes of the program together, in seconds.", above=0
    )
    wall_seconds: float = key(Limits.wall_seconds, "Time limit of the run, in seconds.", above=0)
    memory_mb: int = key(
        Limits.memory_mb,
        "Limit in MiB of the resident memory of all processes together, and of the address space of each process.",
        at_least=1,
    )
    output_kb: int = key(Limits.output_kb, "Limit in KiB of standard output, and of standard error.", at_least=1)
    processes: int = key(Limits.processes, "Maximum number of processes and threads.", at_least=1)
    packages: list[str] = key(
        [],
        "Installed packages that the program may import, with their dependencies, e.g. [numpy, sympy]. Empty: only the standard library.",
    )

    def limits(self) -> Limits:
        """Return the limits of one run."""
        return Limits(**{name: value for name, value in vars(self).items() if name != "packages"})
