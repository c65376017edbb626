"""The recipe's section `sandbox`."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.recipe.key import key
from megarl.sandbox.base import Limits


@dataclass
class SandboxConfig:
    """What a program that the policy wrote may use in one run: a test of the scorers `code` and `code_all`, a call of the
    tool `code_interpreter`; see docs/sandbox.md."""

    cpu_seconds: float = key(Limits.cpu_seconds, "CPU seconds of all its processes together.", above=0)
    wall_seconds: float = key(Limits.wall_seconds, "Seconds.", above=0)
    memory_mb: int = key(
        Limits.memory_mb,
        "MiB resident, of all its processes together; and of address space, of each.",
        at_least=1,
    )
    output_kb: int = key(Limits.output_kb, "KiB on standard output, and on standard error.", at_least=1)
    processes: int = key(Limits.processes, "Processes and threads.", at_least=1)
    packages: list[str] = key(
        [],
        "Installed packages that it may import, with what they need, e.g. [numpy, sympy]. Empty: the standard library.",
    )

    def limits(self) -> Limits:
        """Return the limits of one run."""
        return Limits(
            cpu_seconds=self.cpu_seconds,
            wall_seconds=self.wall_seconds,
            memory_mb=self.memory_mb,
            output_kb=self.output_kb,
            processes=self.processes,
        )
