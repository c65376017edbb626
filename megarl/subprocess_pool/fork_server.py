"""The process from which others are forked: ``python -m megarl.subprocess_pool.fork_server <descriptor>``.

It has one thread, imports what is to be called (never torch or an engine, unless that does) and prepares it once, so that a
process that has to be replaced is ready in milliseconds, and nothing is ever forked from the engine's threads. Messages
are packets of JSON on a socket pair: first [finder, names, settings, memory_mb] (see `work.load_jobs`, `limits`), which are nobody else's to
read, as arguments of a command would be; with ["fork", number] comes the descriptor of the new process's own connection, and another, of its `ProgressMark`, where it is to
have many calls under way together.

Each forked process leads a process group of its own, which is what is killed: whatever a call starts ends with it.
When the owner of the socket pair is gone, all are killed; when this process is, the kernel kills them.
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
from typing import NoReturn

from megarl.cluster.process import die_with_parent, ignore_interrupt
from megarl.cluster.torchrun.wire import Wire
from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.job import Job, load_jobs
from megarl.subprocess_pool.limits import check_memory, limit_memory
from megarl.subprocess_pool.progress_mark import ProgressMark
from megarl.subprocess_pool.serve import serve, serve_concurrently

PACKET = 1 << 16  # bytes of the longest message
OWNER_POLL = 0.5  # seconds between looks at whether the owner still lives


def main(descriptor: int) -> int:
    ignore_interrupt()
    control = socket.socket(fileno=descriptor)
    try:
        finder, names, settings, memory_mb = json.loads(control.recv(PACKET))
        works = load_jobs(finder, names, settings)
        check_memory(memory_mb)
    except BaseException as error:  # noqa: BLE001 -- it is told to the owner
        control.send(json.dumps(["failed", f"{type(error).__name__}: {error}"[:10_000]]).encode())
        return 1
    control.send(b'["ready"]')
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared
    _ForkServer(control, works, memory_mb).serve()
    return 0


class _ForkServer:
    def __init__(self, control: socket.socket, works: dict[str, Job], memory_mb: int | None) -> None:
        self.memory_mb = memory_mb
        self.control, self.works, self.owner = control, works, os.getppid()
        self.children: dict[int, int] = {}  # process id, which is its group's too, to number
        self.ended, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork and kill as told, until the owner is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the owner's end is closed
            while os.getppid() == self.owner:
                readable, _, _ = select.select([self.control, self.ended], [], [], OWNER_POLL)
                if self.ended in readable:
                    self.ended.recv(PACKET)
                    self._reap()
                if self.control in readable:
                    data, descriptors, _, _ = socket.recv_fds(self.control, PACKET, 2, socket.MSG_CMSG_CLOEXEC)
                    if not data:
                        break
                    word, number = json.loads(data)
                    self._obey(word, number, descriptors)
        signal.set_wakeup_fd(-1)  # nobody listens to the ends that follow
        for pid in list(self.children):
            _kill_group(pid)

    def _obey(self, word: str, number: int, descriptors: list[int]) -> None:
        if word == "fork":
            pid = os.fork()
            if pid == 0:
                self._become_worker(*descriptors)
            self.children[pid] = number
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            assert word == "kill", word
            for pid, known in self.children.items():
                if known == number:
                    _kill_group(pid)

    def _reap(self) -> None:
        """Several children may be behind one signal. What a child had started ends with it."""
        while self.children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_group(ended.si_pid)  # before its number is free for others
            _, status = os.waitpid(ended.si_pid, 0)
            number = self.children.pop(ended.si_pid, None)
            if number is not None:
                self.control.send(json.dumps(["ended", number, os.waitstatus_to_exitcode(status)]).encode())

    def _become_worker(self, descriptor: int, mark: int | None = None) -> NoReturn:
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(signal_number, signal.SIG_DFL)
            for connection in (self.control, self.ended, self.wakeup):
                connection.close()
            limit_memory(self.memory_mb)
            connection = socket.socket(fileno=descriptor)
            if mark is None:
                serve(Wire(connection), self.works)
            else:
                serve_concurrently(NonblockingChannel(connection), self.works, ProgressMark(mark))
        finally:
            os._exit(0)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a child that was just forked may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
