"""What checks know a machine by: everything outside is asked here, so that a test can put another machine in its place."""

from __future__ import annotations

import importlib.metadata
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megarl

_IMPORT_PATH = Path(megarl.__file__).resolve().parents[1]  # on sys.path of child processes, for `import megarl`


@dataclass(frozen=True)
class Output:
    """What a command wrote, and how it ended. `status` -1: it did not end in time and was killed."""

    status: int
    text: str  # stdout
    errors: str = ""  # stderr

    @property
    def good(self) -> bool:
        return self.status == 0

    @property
    def last_error(self) -> str:
        """The last line that says something: of a traceback, the exception."""
        lines = [line.strip() for line in (self.errors or self.text).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}, and no word"


@dataclass
class Machine:
    """This machine. `root`: where its files lie; `environ`: the environment that a run would have."""

    root: Path = Path("/")
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    host: str = field(default_factory=socket.gethostname)
    python: tuple[int, int, int] = sys.version_info[:3]
    arch: str = field(default_factory=platform.machine)

    def path(self, path: str) -> Path:
        """An absolute path of this machine, or one from the working directory."""
        return self.root / path.lstrip("/") if path.startswith("/") else Path(path)

    def read(self, path: str) -> str | None:
        """The file's text; None where there is none, or it may not be read."""
        try:
            return self.path(path).read_text(errors="replace")
        except OSError:
            return None

    def glob(self, pattern: str) -> list[str]:
        """Files that an absolute pattern fits, as this machine names them, sorted."""
        return sorted("/" + str(path.relative_to(self.root)) for path in self.root.glob(pattern.lstrip("/")))

    def version(self, package: str) -> str | None:
        """Of an installed distribution; None where it is not installed."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def run(self, command: Sequence[str], seconds: float = 5.0) -> Output | None:
        """None where there is no such program."""
        return run(command, self.environ, seconds)

    def python_code(self, code: str, seconds: float, **environment: str) -> Output:
        """Run in an interpreter of its own, so that a crash, an exception or a wait says itself. It can import megarl."""
        paths = [str(_IMPORT_PATH), *filter(None, [self.environ.get("PYTHONPATH")])]
        environ = {**self.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
        output = run([sys.executable, "-c", code], environ, seconds)
        assert output is not None
        return output

    def cannot_bind(self, port: int) -> str:
        """Why a server cannot listen on TCP port `port`; "" where it can."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # left-overs of closed connections are no bar
            try:
                listener.bind(("", port))
            except OSError as error:
                return error.strerror or str(error)
        return ""

    def fetch(self, url: str, seconds: float) -> str:
        """Why `url` does not answer within `seconds`; "" where it does, whatever its status. Names are looked up in a
        thread: the system's own limit on that is half a minute."""
        said: list[str] = []

        def ask() -> None:
            try:
                urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
                said.append("")
            except urllib.error.HTTPError:
                said.append("")
            except (OSError, ValueError) as error:
                said.append(str(getattr(error, "reason", error)))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        return said[0] if said else f"no answer within {seconds:.0f} s"

    def open_files(self) -> tuple[int, int]:
        """Soft and hard limit of a process."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = sys.maxsize
        return (most if soft == resource.RLIM_INFINITY else soft, most if hard == resource.RLIM_INFINITY else hard)

    def disk(self, path: str) -> tuple[int, int]:
        """Bytes of the file system that `path`, or the nearest folder above it, lies on: in all, and free."""
        wanted = self.path(path).absolute()
        usage = shutil.disk_usage(next(one for one in (wanted, *wanted.parents) if one.exists()))
        return usage.total, usage.free

    def cores(self) -> int:
        """That this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def clocks(self) -> tuple[float, float]:
        """Seconds of the wall clock since 1970, and of the clock that nobody sets."""
        return time.time(), time.monotonic()

    def sandbox_lacks(self) -> list[str]:
        from megarl import sandbox

        return sandbox.missing()


def run(command: Sequence[str], environ: dict[str, str], seconds: float) -> Output | None:
    """See `Machine.run`."""
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


def once(function: Callable[..., Any]) -> Callable[[Machine], Any]:
    """What several checks ask of a machine is found out once, whoever asks first."""
    lock, name = threading.Lock(), f"_known_{function.__name__}"

    def known(machine: Machine) -> Any:
        with lock:
            if not hasattr(machine, name):
                setattr(machine, name, function(machine))
            return getattr(machine, name)

    return known
