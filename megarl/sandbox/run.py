"""Run a program in the sandbox and enforce its limits.

The kernel enforces most limits (command.py). This module enforces wall time, output and the limits that are summed over
processes: it checks every LOOK seconds and kills the init of the sandbox's process namespace, and the kernel then kills
all processes in the namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import IO

from megarl.sandbox import usage
from megarl.sandbox.base import Limit, Limits, Result, SandboxError
from megarl.sandbox.command import PROGRAM, SCRATCH, command, environment
from megarl.sandbox.packages import folders_of
from megarl.sandbox.syscalls import filter_program

LOOK = 0.05  # seconds between checks of a run's usage
CHUNK = 1 << 16
DEATH = 10.0  # seconds that the kernel may take to end killed processes


def run_unchecked(source: str, stdin: str = "", limits: Limits | None = None, packages: Collection[str] = ()) -> Result:
    """`megarl.sandbox.run` without the check of this machine. The check's trial run uses it too."""
    limits = limits or Limits()
    shown = folders_of(tuple(packages)) if packages else {}
    with contextlib.ExitStack() as stack:
        program, filters = (stack.enter_context(_in_memory(data)) for data in (source.encode(), filter_program()))
        status, status_end = os.pipe()
        stack.callback(os.close, status)
        arguments = command(
            limits,
            shown,
            status=status_end,
            filters=filters,
            program=program,
            as_root=os.geteuid() == 0,
        )
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(bool(shown)),
                pass_fds=(status_end, filters, program),
                cwd="/",
            )
        finally:
            os.close(status_end)
        return _Run(process, status, stdin.encode(), limits, started).result()


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """Yield a file descriptor from which `data` can be read once."""
    descriptor = os.memfd_create("sandbox")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass
class _Run:
    process: subprocess.Popen[bytes]
    status: int  # descriptor: bubblewrap's messages, JSON documents
    stdin: bytes
    limits: Limits
    started: float
    limit: Limit | None = None
    init: int | None = None  # process id of the sandbox's init, as this machine sees it
    init_handle: int | None = None  # its pidfd
    written: int = 0  # bytes of stdin
    cpu_seconds: float = 0.0
    received: dict[str, bytearray] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def result(self) -> Result:
        try:
            self._watch()
        finally:
            self._end()
        wall = time.monotonic() - self.started
        stdout, stderr = (self.received[name].decode(errors="replace") for name in ("stdout", "stderr"))
        codes = [message["exit-code"] for message in self._messages() if "exit-code" in message]
        if self.limit is None and not codes:
            raise SandboxError(
                f"bubblewrap ended with {self.process.returncode} before the program did: {stderr.strip()[-2000:]}"
            )
        if self.limit is None and codes[0] in (128 + signal.SIGXCPU, 128 + signal.SIGKILL):
            # The kernel enforces the CPU limit too, per process and in ticks.
            self.limit = "cpu" if self.cpu_seconds >= 0.9 * self.limits.cpu_seconds else None
        return Result(stdout, stderr, None if self.limit else codes[0], self.limit, wall, self.cpu_seconds)

    def _watch(self) -> None:
        """Feed stdin and read the outputs until all are closed or a limit is reached."""
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.received = {name: bytearray() for name in ("stdout", "stderr", "status")}
        os.set_blocking(self.process.stdin.fileno(), False)
        self.selector.register(self.process.stdout.fileno(), selectors.EVENT_READ, "stdout")
        self.selector.register(self.process.stderr.fileno(), selectors.EVENT_READ, "stderr")
        self.selector.register(self.status, selectors.EVENT_READ, "status")
        self.selector.register(self.process.stdin.fileno(), selectors.EVENT_WRITE, "stdin")
        look, end = time.monotonic() + LOOK, self.started + self.limits.wall_seconds
        while self.selector.get_map() and self.limit is None:
            for key, _ in self.selector.select(max(0.0, min(look, end) - time.monotonic())):
                if key.data == "stdin":
                    self._write(self.process.stdin)
                else:
                    self._read(key.fd, key.data)
            if time.monotonic() >= end:
                self._stop("wall")
            elif time.monotonic() >= look:
                self._look()
                look = time.monotonic() + LOOK

    def _write(self, stream: IO[bytes]) -> None:
        try:
            self.written += os.write(stream.fileno(), self.stdin[self.written : self.written + CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program closed its stdin
            self.written = len(self.stdin)
        if self.written >= len(self.stdin):
            self.selector.unregister(stream.fileno())
            stream.close()

    def _read(self, descriptor: int, name: str) -> None:
        data, most = os.read(descriptor, CHUNK), self.limits.output_kb << 10
        if not data:
            self.selector.unregister(descriptor)
        self.received[name] += data
        if name == "status":
            self._find_init()
        elif len(self.received[name]) > most:
            del self.received[name][most:]
            self._stop("output")

    def _find_init(self) -> None:
        numbers = [message["child-pid"] for message in self._messages() if "child-pid" in message]
        if self.init is not None or not numbers:
            return
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(numbers[0])
            if usage.parent(numbers[0]) != self.process.pid:  # the init has ended, and another process has its id
                os.close(handle)
                return
            self.init, self.init_handle = numbers[0], handle

    def _messages(self) -> list[dict[str, int]]:
        return [json.loads(line) for line in self.received["status"].splitlines() if line.rstrip().endswith(b"}")]

    def _look(self) -> None:
        if self.init is None or not usage.sees(self.init, PROGRAM):
            return  # the sandbox is starting or ending
        cpu_seconds, memory = usage.cpu_and_memory(self.init)
        if cpu_seconds > self.limits.cpu_seconds:
            self._stop("cpu")
        elif memory > self.limits.memory_mb << 20:
            self._stop("memory")
        elif usage.files(self.init, SCRATCH) > self.limits.scratch_files:
            self._stop("files")

    def _stop(self, limit: Limit) -> None:
        self.limit = self.limit or limit

    def _end(self) -> None:
        """Kill the init, wait until the kernel has ended its namespace, and free the run's descriptors."""
        if self.init_handle is None:
            os.kill(self.process.pid, signal.SIGKILL)  # Popen.kill may reap the process, and its CPU time is then lost
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_handle, signal.SIGKILL)
            ended = select.poll()
            ended.register(self.init_handle, select.POLLIN)
            if not ended.poll(DEATH * 1000):
                raise SandboxError(f"process {self.init} was killed {DEATH:g} s ago and has not ended")
            os.close(self.init_handle)
        # Bubblewrap waits for the init, so its CPU time includes the init and all processes that the init reaped.
        _, code, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(code)
        self.cpu_seconds = used.ru_utime + used.ru_stime
        self.selector.close()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
