"""Limits, results and errors of sandbox runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Limit = Literal["cpu", "wall", "memory", "files", "output"]


@dataclass(frozen=True)
class Limits:
    """Limits of a run. A run that exceeds one of the first five is killed with all its processes."""

    cpu_seconds: float = 10.0  # sum over all processes
    wall_seconds: float = 30.0
    memory_mb: int = 1024  # MiB of resident memory, summed over all processes; also of address space, for each process
    scratch_files: int = 10_000  # files and folders in the scratch folder
    output_kb: int = 4096  # KiB of stdout; the same for stderr
    scratch_mb: int = 64  # MiB in the scratch folder; a larger write fails
    processes: int = 16  # processes and threads; starting more fails

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"the sandbox's limit {name} is {value}: it must be more than 0")


@dataclass(frozen=True)
class Result:
    """Output and end of a program.

    `stdout` and `stderr` have at most Limits.output_kb each, decoded as UTF-8 with replacement characters. `limit` is
    the limit that ended the program. If it is None, `exit_code` is the program's exit code, or 128 + n if signal n
    ended it. `cpu_seconds` covers all processes that the program or the sandbox's init waited for.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    limit: Limit | None
    wall_seconds: float
    cpu_seconds: float

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.limit is None

    @property
    def signal(self) -> int | None:
        return self.exit_code - 128 if self.exit_code is not None and self.exit_code > 128 else None


class SandboxUnavailable(RuntimeError):
    """This machine cannot run untrusted code safely; the message names the missing packages or permissions."""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program."""
