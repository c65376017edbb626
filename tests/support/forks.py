"""Start processes of tests by fork of a process that has imported the large packages already.

Importing torch, Megatron and transformers takes eight seconds of a core, vLLM twelve: more than most tests compute.

    process = start("trainer", "tests.support.megatron_worker", [file, directory], environment, log)
    process.wait()

`SERVERS` names the modules that are imported before the fork. A server starts at the first use, one for each name and each
value of the variables `_READ_BY_IMPORTS`, and lives until the process of the tests ends. The child is as a fresh ``python -m
MODULE ARGUMENTS`` in the given environment, except that other variables which the imports read count as the server had them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVERS = {
    "trainer": "tests.support.preload_trainer",
    "mindspeed": "tests.support.preload_mindspeed",
    "transformer_engine": "tests.support.preload_transformer_engine",
    "engine": "tests.support.preload_engine",
    "nothing": "tests",
}
_READ_BY_IMPORTS = ("PYTHON", "MEGARL_TEST_")
_LOST = 255  # exit status of a process that has lost its server


class Forked:
    """A process, with the part of `subprocess.Popen` and `multiprocessing.Process` that tests use."""

    def __init__(self, server: _Server, number: int, pid: int) -> None:
        self._server, self._number, self.pid = server, number, pid

    def poll(self) -> int | None:
        """The exit status, minus the signal's number for a process that was killed; None while it runs."""
        return self._server.status(self._number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def start(
    server: str, module: str, arguments: Sequence[Any], environment: Mapping[str, str], log: Path | None = None
) -> Forked:
    """Run ``python -m module ARGUMENTS`` in the repository's root, forked from the server of that name.

    `log`: file for what it prints, which begins with what the imports printed; None: the output of the tests' process.
    """
    key = (server, *sorted(item for item in environment.items() if item[0].startswith(_READ_BY_IMPORTS)))
    with _lock:
        if key not in _servers or _servers[key].process.poll() is not None:
            _servers[key] = _Server(SERVERS[server], environment)
        return _servers[key].start(module, [str(argument) for argument in arguments], environment, log)


_lock = threading.Lock()
_servers: dict[tuple[Any, ...], _Server] = {}


class _Server:
    def __init__(self, preload: str, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, preload, str(theirs.fileno())],
                cwd=ROOT,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            self._lock, self._ended, self._count = threading.Lock(), dict[int, int](), 0
            self._connection = Connection(ours.detach())
            try:
                self._connection.recv()  # after the imports
            except EOFError:
                printed.seek(0)
                raise RuntimeError(f"importing {preload} failed:\n{printed.read().decode()[-4000:]}") from None
            printed.seek(0)
            self.printed = printed.read()

    def start(self, module: str, arguments: list[str], environment: Mapping[str, str], log: Path | None) -> Forked:
        if log is not None:
            log.write_bytes(self.printed)
        with self._lock:
            self._count += 1
            number = self._count
            here = f"/proc/{os.getpid()}/fd"
            output = (f"{here}/1", f"{here}/2") if log is None else (str(log), str(log))
            self._connection.send((number, module, arguments, dict(environment), output))
            while True:
                kind, of, value = self._connection.recv()
                if kind == "started":
                    assert of == number
                    return Forked(self, number, value)
                self._ended[of] = value

    def status(self, number: int) -> int | None:
        with self._lock:
            try:
                while self._connection.poll():
                    _, of, value = self._connection.recv()
                    self._ended[of] = value
            except (EOFError, ConnectionResetError):
                self.process.wait(20)  # its connection closes before its exit status can be fetched
                return self._ended.get(number, _LOST)
            return self._ended.get(number)


def _serve(connection: Connection) -> tuple[str, list[str], dict[str, str], tuple[str, str]]:
    """Fork at each request until the tests' process ends. Returns the request in each child."""
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    connection.send("imported")
    while True:
        ready, _, _ = select.select([connection.fileno(), wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection.send(("ended", running.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])))
        if connection.fileno() in ready:
            try:
                number, *request = connection.recv()
            except EOFError:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            if pid := os.fork():
                running[pid] = number
                connection.send(("started", number, pid))
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            os.close(wakes)
            os.close(wake)
            module, arguments, environment, output = request
            return module, arguments, environment, output


def main() -> None:
    importlib.import_module(sys.argv[1])
    gc.collect()
    gc.freeze()  # a collection in a child would copy all pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process ends this one
    module, arguments, environment, output = _serve(Connection(int(sys.argv[2])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    for path, descriptor in zip(output, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
