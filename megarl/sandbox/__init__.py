"""Run untrusted Python code without network and without access to files. Guarantees: docs/sandbox.md."""

from __future__ import annotations

from collections.abc import Collection

from megarl.sandbox.base import Limits, Result, SandboxError, SandboxUnavailable
from megarl.sandbox.detect import missing, require
from megarl.sandbox.packages import folders_of
from megarl.sandbox.run import run_unchecked

__all__ = ["Limits", "Result", "SandboxError", "SandboxUnavailable", "check", "missing", "require", "run"]


def check(packages: Collection[str] = ()) -> None:
    """Check that programs can run here with `packages`.

    Raises SandboxUnavailable if this machine cannot run the sandbox, and ValueError if a package is not installed.
    """
    require()
    folders_of(tuple(packages))


def run(source: str, stdin: str = "", limits: Limits | None = None, packages: Collection[str] = ()) -> Result:
    """Run Python source in the sandbox and wait until it ends. Thread-safe.

    The program can import the standard library of this interpreter and `packages` (names of installed packages; their
    dependencies are included). Its working directory is an empty scratch folder, deleted after the run.

    Raises:
        SandboxUnavailable: this machine cannot run the sandbox; the message names the missing packages or permissions.
        SandboxError: the sandbox failed, independent of the program.
    """
    require()
    return run_unchecked(source, stdin, limits, packages)
