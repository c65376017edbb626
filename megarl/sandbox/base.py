"""What a run in the sandbox is limited to, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Limit = Literal["cpu", "wall", "memory", "files", "output"]


@dataclass(frozen=True)
class Limits:
    """What one run may use. Whoever reaches one of the first five is killed with everything it started."""

    cpu_seconds: float = 10.0  # of all processes together
    wall_seconds: float = 30.0
    memory_mb: int = 1024  # MiB resident, of all processes together; of address space, for each process
    scratch_files: int = 10_000  # files and folders in the scratch folder
    output_kb: int = 4096  # KiB of stdout, and of stderr
    scratch_mb: int = 64  # MiB in the scratch folder; a write past it fails
    processes: int = 16  # and threads; starting one more fails

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"the sandbox's limit {name} is {value}: it must be more than 0")


@dataclass(frozen=True)
class Result:
    """What a program did.

    `stdout` and `stderr` hold at most Limits.output_kb each, decoded as UTF-8 with replacements. `limit` is the one
    that ended it, or None where it ended by itself; then `exit_code` is its own, 128 + n where signal n ended it.
    CPU seconds are those of all its processes that it (or the sandbox's init) waited for.
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
    """This machine cannot run untrusted code safely; the message says what to install or allow."""


class SandboxError(RuntimeError):
    """The sandbox itself failed, and not the program in it."""
