"""The process from which scoring processes are forked: ``python -m megarl.scoring.nursery <descriptor> <scorers as JSON>``.

It has one thread, imports scorers (never torch or an engine, unless a scorer does) and prepares them once, so that a
process that has to be replaced is ready in milliseconds, and nothing is ever forked from the engine's threads. Messages
are packets of JSON on a socket pair; with ["fork", number] comes the descriptor of the new process's own connection.

Each scoring process leads a process group of its own, which is what is killed: whatever a scorer starts ends with it.
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
from typing import Any, NoReturn

from megarl import rewards
from megarl.cluster.process import die_with_parent, ignore_interrupt
from megarl.cluster.wire import Wire
from megarl.rewards import RewardError, Scorer, ScoreRequest

PACKET = 1 << 16  # bytes of the longest message
OWNER_POLL = 0.5  # seconds between looks at whether the owner still lives


def main(descriptor: int, names: list[str]) -> int:
    ignore_interrupt()
    control = socket.socket(fileno=descriptor)
    try:
        scorers = {name: rewards.find(name) for name in names}
        for scorer in scorers.values():
            if scorer.prepare is not None:
                scorer.prepare()
    except BaseException as error:  # noqa: BLE001 -- it is told to the owner
        control.send(json.dumps(["failed", f"{type(error).__name__}: {error}"[:10_000]]).encode())
        return 1
    control.send(b'["ready"]')
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared
    _Nursery(control, scorers).serve()
    return 0


class _Nursery:
    def __init__(self, control: socket.socket, scorers: dict[str, Scorer]) -> None:
        self.control, self.scorers, self.owner = control, scorers, os.getppid()
        self.children: dict[int, int] = {}  # process id, which is its group's too, to number
        self.ended, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork and kill as told, until the owner is gone."""
        with contextlib.suppress(OSError):
            while os.getppid() == self.owner:
                readable, _, _ = select.select([self.control, self.ended], [], [], OWNER_POLL)
                if self.ended in readable:
                    self.ended.recv(PACKET)
                    self._reap()
                if self.control in readable:
                    data, descriptors, _, _ = socket.recv_fds(self.control, PACKET, 1, socket.MSG_CMSG_CLOEXEC)
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
                self._become_worker(descriptors[0])
            self.children[pid] = number
            os.close(descriptors[0])
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

    def _become_worker(self, descriptor: int) -> NoReturn:
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(signal_number, signal.SIG_DFL)
            for connection in (self.control, self.ended, self.wakeup):
                connection.close()
            _work(Wire(socket.socket(fileno=descriptor)), self.scorers)
        finally:
            os._exit(0)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a child that was just forked may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _work(wire: Wire, scorers: dict[str, Scorer]) -> None:
    """Answer each list of (scorer, request) with one message a request, in their order."""
    wire.send("ready")
    while True:
        try:
            tasks: list[tuple[str, ScoreRequest]] = wire.receive()
        except EOFError:
            return
        for name, request in tasks:
            wire.send(_attempt(scorers[name], request))


def _attempt(scorer: Scorer, request: ScoreRequest) -> Any:
    """A Score, or the cause of a failure as text."""
    try:
        return rewards.score(scorer, request)
    except RewardError as error:
        return error.cause
    except BaseException as error:  # noqa: BLE001 -- sys.exit() and the like: one sample's failure
        return f"it raised {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2])))
