"""The checks' access to the machine. All system calls are methods of `Machine`, so tests can replace it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megarl
from megarl.platform.version_sets import version_of


@dataclass(frozen=True)
class Output:
    """Exit status and output of a command."""

    status: int  # -1: it was killed after its time limit
    text: str  # stdout
    errors: str = ""  # stderr

    @property
    def good(self) -> bool:
        return self.status == 0

    @property
    def late(self) -> bool:
        """True if the command was killed after its time limit."""
        return self.status == -1

    @property
    def last_error(self) -> str:
        """The last non-empty line of stderr (of a traceback, the exception), else of stdout."""
        lines = [line.strip() for line in (self.errors or self.text).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}, without output"


@dataclass
class Machine:
    """This machine. `root` is the root of its file system, `environ` the environment that a run would have."""

    root: Path = Path("/")
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    host: str = field(default_factory=socket.gethostname)
    python: tuple[int, int, int] = sys.version_info[:3]
    arch: str = field(default_factory=platform.machine)

    def path(self, path: str) -> Path:
        """Map an absolute path below `root`; a relative path stays relative to the working directory."""
        return self.root / path.lstrip("/") if path.startswith("/") else Path(path)

    def read(self, path: str) -> str | None:
        """Return the file's text, or None if it cannot be read."""
        try:
            return self.path(path).read_text(errors="replace")
        except OSError:
            return None

    def glob(self, pattern: str) -> list[str]:
        """Return the sorted absolute paths that match an absolute pattern."""
        return sorted("/" + str(path.relative_to(self.root)) for path in self.root.glob(pattern.lstrip("/")))

    def version(self, package: str) -> str | None:
        """Return the version of an installed distribution, or None if it is not installed."""
        return version_of(package)

    def run(self, command: Sequence[str], seconds: float = 5.0) -> Output | None:
        """Run a command with a time limit. Return None if the program does not exist."""
        return run(command, self.environ, seconds)

    def python_code(self, code: str, seconds: float, **environment: str) -> Output:
        """Run code that can import megarl in a child process, so that a crash or a hang becomes an `Output`."""
        environ = {**self.environ, "PYTHONPATH": import_path(self.environ), **environment}
        output = run([sys.executable, "-c", code], environ, seconds)
        assert output is not None
        return output

    def cannot_bind(self, port: int) -> str:
        """Return why a server cannot listen on TCP port `port`, or "" if it can."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
            try:
                listener.bind(("", port))
            except OSError as error:
                return error.strerror or str(error)
        return ""

    def fetch(self, url: str, seconds: float) -> str:
        """Return why `url` does not answer within `seconds`, or "" if it answers with any HTTP status.

        The request runs in a thread because name resolution has a system limit of half a minute.
        """
        problems: list[str] = []

        def ask() -> None:
            try:
                urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
                problems.append("")
            except urllib.error.HTTPError:
                problems.append("")
            except (OSError, ValueError) as error:
                problems.append(str(getattr(error, "reason", error)))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        return problems[0] if problems else f"no answer within {seconds:.0f} s"

    def open_files(self) -> tuple[int, int]:
        """Return the soft and hard limit on open files of a process."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = sys.maxsize
        return (most if soft == resource.RLIM_INFINITY else soft, most if hard == resource.RLIM_INFINITY else hard)

    def disk(self, path: str) -> tuple[int, int]:
        """Return total and free bytes of the file system of `path`, or of its nearest existing parent."""
        usage = shutil.disk_usage(existing_path(self.path(path)))
        return usage.total, usage.free

    def cores(self) -> int:
        """Return the number of CPU cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def clocks(self) -> tuple[float, float]:
        """Return the wall clock (seconds since 1970) and the monotonic clock (seconds)."""
        return time.time(), time.monotonic()

    def sandbox_lacks(self) -> list[str]:
        from megarl import sandbox

        return sandbox.missing()


def existing_path(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


def import_path(environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of a child process that imports megarl: the folder of this package first."""
    return os.pathsep.join(
        [str(Path(megarl.__file__).resolve().parents[1]), *filter(None, [environ.get("PYTHONPATH")])]
    )


def run(command: Sequence[str], environ: dict[str, str], seconds: float) -> Output | None:
    """Run a command. Return None if the program does not exist; see `Machine.run`."""
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Output(-1, "", f"{command[0]} did not end within {seconds:.0f} s")
    return Output(done.returncode, done.stdout, done.stderr)


def cached_per_machine(function: Callable[..., Any]) -> Callable[[Machine], Any]:
    """Cache the result of a function of a machine on that machine, for checks that share it."""
    lock, name = threading.Lock(), f"_cached_{function.__name__}"

    def cached(machine: Machine) -> Any:
        with lock:
            if not hasattr(machine, name):
                setattr(machine, name, function(machine))
            return getattr(machine, name)

    return cached
