"""The fork server, from which worker processes are forked: ``python -m megarl.subprocess_pool.fork_server <descriptor>``.

It has one thread. It imports and prepares the jobs once (torch or an engine only if a job imports them), so a replacement
worker is ready in milliseconds and no process is ever forked from the engine's threads. Messages are JSON packets on a
socket pair, which other users cannot read, unlike command line arguments. The first is
[factory, names, settings, memory_mb] (see `job.load_jobs`, `limits`). With ["fork", number] come the descriptor of the
worker's connection and, for concurrent calls, the descriptor of its `ProgressMark`.

Each worker leads a process group. Killing the group also kills what a call has started. If the pool's process dies, the
fork server kills all workers; if the fork server dies, the kernel kills them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from megarl.cluster.process import die_with_parent, ignore_interrupt
from megarl.cluster.wire import Wire
from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.job import Job, load_jobs
from megarl.subprocess_pool.limits import check_memory, limit_memory
from megarl.subprocess_pool.output import WorkerOutput
from megarl.subprocess_pool.progress_mark import ProgressMark
from megarl.subprocess_pool.serve import ConcurrentServer, serve

PACKET = 1 << 16  # bytes of the longest message
OWNER_POLL = 0.5  # seconds between checks that the pool's process is alive


def main(descriptor: int) -> int:
    ignore_interrupt()
    control = socket.socket(fileno=descriptor)
    try:
        factory, names, settings, memory_mb = json.loads(control.recv(PACKET))
        jobs = load_jobs(factory, names, settings)
        check_memory(memory_mb)
    except BaseException as error:  # noqa: BLE001 -- reported to the pool
        control.send(json.dumps(["failed", f"{type(error).__name__}: {error}"[:10_000]]).encode())
        return 1
    control.send(b'["ready"]')
    gc.collect()
    gc.freeze()  # keeps pages shared with the workers
    _ForkServer(control, jobs, memory_mb).serve()
    return 0


class _ForkServer:
    def __init__(self, control: socket.socket, jobs: dict[str, Job], memory_mb: int | None) -> None:
        self.memory_mb = memory_mb
        self.control, self.jobs, self.owner = control, jobs, os.getppid()
        self.children: dict[int, int] = {}  # process id, which is also the group's id, to worker number
        self.child_ended, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        self.output = WorkerOutput()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Execute fork and kill commands until the pool's process ends."""
        sources: list[Any] = [self.control, self.child_ended, self.output]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the pool has closed its end
            while os.getppid() == self.owner:
                readable, _, _ = select.select(sources, [], [], OWNER_POLL)
                if self.output in readable:
                    self.output.forward()
                if self.child_ended in readable:
                    self.child_ended.recv(PACKET)
                    self._reap()
                if self.control in readable:
                    data, descriptors, _, _ = socket.recv_fds(self.control, PACKET, 2, socket.MSG_CMSG_CLOEXEC)
                    if not data:
                        break
                    command, number = json.loads(data)
                    self._execute(command, number, descriptors)
        signal.set_wakeup_fd(-1)  # children that end from here on are not reported
        for pid in list(self.children):
            _kill_group(pid)
        self.output.drain()

    def _execute(self, command: str, number: int, descriptors: list[int]) -> None:
        if command == "fork":
            pid = os.fork()
            if pid == 0:
                self._become_worker(*descriptors)
            self.children[pid] = number
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            assert command == "kill", command
            for pid, child in self.children.items():
                if child == number:
                    _kill_group(pid)

    def _reap(self) -> None:
        """Report every child that has ended, and kill the processes it started. One signal may stand for several."""
        while self.children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_group(ended.si_pid)  # before the process id can be reused
            _, status = os.waitpid(ended.si_pid, 0)
            number = self.children.pop(ended.si_pid, None)
            if number is not None:
                self.control.send(json.dumps(["ended", number, os.waitstatus_to_exitcode(status)]).encode())

    def _become_worker(self, descriptor: int, mark: int | None = None) -> NoReturn:
        """Serve calls until the pool closes its end. An error is printed, and the exit status is then 1."""
        status = 1
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(signal_number, signal.SIG_DFL)
            for connection in (self.control, self.child_ended, self.wakeup):
                connection.close()
            self.output.redirect()
            limit_memory(self.memory_mb)
            connection = socket.socket(fileno=descriptor)
            if mark is None:
                serve(Wire(connection), self.jobs)
            else:
                ConcurrentServer(NonblockingChannel(connection), self.jobs, ProgressMark(mark)).run()
            status = 0
        except (BrokenPipeError, ConnectionResetError):  # the pool has closed its end
            status = 0
        except BaseException:  # noqa: BLE001 -- nothing of the fork server may run in the worker
            traceback.print_exc()
        finally:
            os._exit(status)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a child that was just forked may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
