"""The ranks of a torchrun group as the controller, rank 0, sees them: peers over a Unix socket, and its own trainer's thread."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import threading
import time
from typing import Any

from megarl.cluster.failures import Failure, ProcessInfo, Raised, Returned
from megarl.cluster.process import private_directory
from megarl.cluster.torchrun.rank import JOIN_SECONDS, RankWorker, StopMessage, socket_path
from megarl.cluster.wire import SendQueue, UnreadableMessage, Wire

TERMINATE_SECONDS = 3.0  # time to find the failed rank after torchrun's SIGTERM, and for ranks to end


class PeerRank:
    """Rank 0's connection to another rank."""

    def __init__(self, wire: Wire, place: ProcessInfo) -> None:
        self.wire, self.place = wire, place
        self.death: Failure | None = None
        self.answers: queue.SimpleQueue[Returned | Failure] = queue.SimpleQueue()
        self._outgoing = SendQueue(wire)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                outcome = self.wire.receive()
            except EOFError:
                cause = "its process ended without a message (torchrun's report names the exit code or signal)"
                self.death = Failure.death(self.place, cause)
                self.answers.put(self.death)
                return
            except UnreadableMessage as error:
                outcome = Raised.of(error)
            self.answers.put(outcome if isinstance(outcome, Returned) else Failure.raised(self.place, outcome))

    def send(self, message: Any) -> None:
        self._outgoing.send(message)

    def finish(self) -> None:
        self._outgoing.finish(TERMINATE_SECONDS)

    def wake(self) -> None:
        """Continue the process if it is stopped: otherwise torchrun waits half a minute before it kills it."""
        with contextlib.suppress(OSError):  # the process has ended
            os.kill(self.place.pid, signal.SIGCONT)


class LocalRank:
    """Rank 0's trainer: a thread that serves calls as the other ranks do."""

    def __init__(self) -> None:
        self.place = ProcessInfo("trainer rank 0", pid=os.getpid())
        self.answers: queue.SimpleQueue[Returned | Failure] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy = False
        self._thread = threading.Thread(target=self._serve, name="trainer-0", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        rank = RankWorker()
        while not isinstance(message := self._messages.get(), StopMessage):
            self.busy = True
            outcome = rank.answer(message)
            self.busy = False
            self.answers.put(outcome if isinstance(outcome, Returned) else Failure.raised(self.place, outcome))

    def send(self, message: Any) -> None:
        self._messages.put(message)

    def join(self) -> None:
        """Wait up to `TERMINATE_SECONDS` for the thread: native code still running at exit aborts the process."""
        self._thread.join(TERMINATE_SECONDS)


def listen(world_size: int) -> list[PeerRank]:
    """Wait until every other rank has connected; returns the connections in rank order."""
    if world_size == 1:
        return []
    path = socket_path()
    private_directory(path.parent)
    path.unlink(missing_ok=True)  # left by a killed run
    peers: dict[int, PeerRank] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(world_size)
            while len(peers) < world_size - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                wire = Wire(listener.accept()[0])
                rank, place = wire.receive()
                peers[rank] = PeerRank(wire, place)
    except TimeoutError as error:
        missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in peers)
        message = f"trainer ranks {missing} did not connect to the controller within {JOIN_SECONDS:.0f} s."
        raise TimeoutError(message) from error
    finally:
        shutil.rmtree(path.parent)
    return [peers[rank] for rank in sorted(peers)]
