"""Running code that nobody has read: no network, no files, nothing left behind. docs/sandbox.md says what is guaranteed."""

from __future__ import annotations

from collections.abc import Collection

from megarl.sandbox.base import Limits, Result, SandboxError, SandboxUnavailable
from megarl.sandbox.detect import missing, require
from megarl.sandbox.packages import folders_of
from megarl.sandbox.run import run_unchecked

__all__ = ["Limits", "Result", "SandboxError", "SandboxUnavailable", "check", "missing", "require", "run"]


def check(packages: Collection[str] = ()) -> None:
    """Check that programs can run here with `packages`.

    Raises SandboxUnavailable if this machine has no sandbox, and ValueError if a package is not installed.
    """
    require()
    folders_of(tuple(packages))


def run(source: str, stdin: str = "", limits: Limits | None = None, packages: Collection[str] = ()) -> Result:
    """Run Python source in the sandbox and wait for its end. Any number of threads may call this at once.

    It sees the standard library of this interpreter, `packages` (installed ones, by their names, with what they need),
    and an empty scratch folder, its working directory, which ends with it.

    Raises:
        SandboxUnavailable: this machine has no means to do it safely; the message says what to install.
        SandboxError: the sandbox failed, which says nothing about the program.
    """
    require()
    return run_unchecked(source, stdin, limits, packages)
