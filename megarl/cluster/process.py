"""Set up a child process of the cluster: output, signals, ports and environment."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

from megarl.cluster.base import host_name
from megarl.cluster.failures import HEADER
from megarl.platform.installed import version_lines

# Set by torchrun for its ranks; an engine that inherits them would behave as a rank.
TORCHRUN_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
TORCHRUN_VARIABLES |= {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}

_PR_SET_PDEATHSIG = 1


def redirect_output(log: str, name: str) -> None:
    """Send this process's stdout and stderr, file descriptors included, to the end of `log`, and write a line with its name and versions."""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # New objects: the present sys.stdout may write to another file, or buffer whole blocks.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    started = f"{name}, pid {os.getpid()} on {host_name()}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    # One line, because messages about a failure leave out this line (`failures.log_tail`).
    print(f"{HEADER} {'; '.join([started, *version_lines()])} ===")
    faulthandler.enable(file=sys.stderr)  # a crash in native code writes its Python stack here


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel to send this process a signal when its parent ends. Linux only; no effect elsewhere."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # the parent ended before prctl
        os.kill(os.getpid(), signal_number)


def ignore_interrupt() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: only the controller reacts to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_on_quit() -> None:
    """Let SIGQUIT end this process. SGLang's processes report their failures to an engine only in this way.

    Shells ignore SIGQUIT in background jobs of scripts, and child processes inherit it. Python sets a signal's action only in
    the main thread, and Ray runs asynchronous actors in another one, so that this calls the C library.
    """
    set_action = ctypes.CDLL(None).signal
    set_action.argtypes, set_action.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_action(signal.SIGQUIT, signal.SIG_DFL)


def private_directory(path: Path) -> None:
    """Create a directory that only this user can open. Raises ValueError if it exists and is open to other users."""
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise ValueError(f"{path} exists and is open to other users: remove it.")


def free_port() -> int:
    """Return a TCP port that is free at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def child_environment(more: dict[str, str]) -> dict[str, str]:
    """Environment of a child process: without torchrun's variables, with `more` and with this process's import path."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return environment | more | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
