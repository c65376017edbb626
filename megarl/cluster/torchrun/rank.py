"""torchrun ranks other than 0, which serve the controller's calls, and the messages between them and rank 0."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.base import load_class
from megarl.cluster.failures import ProcessInfo, Raised, Returned, run
from megarl.cluster.process import die_with_parent, ignore_interrupt, redirect_output
from megarl.cluster.stacks.channel import serve_stacks
from megarl.cluster.wire import UnreadableMessage, Wire

LONGEST_SOCKET_PATH = 107  # bytes, Linux
JOIN_SECONDS = 300.0  # time for the ranks to import their modules and connect


@dataclass(frozen=True)
class ConstructMessage:
    class_path: str
    args: tuple[Any, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class CallMessage:
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class StopMessage:
    """End after the present call, or ``now``, because that call may never end."""

    now: bool


class RankWorker:
    """Constructs a rank's object and calls its methods."""

    def __init__(self) -> None:
        self._worker: Any = None

    def answer(self, message: ConstructMessage | CallMessage | Raised) -> Returned | Raised:
        """Construct the object or call its method. The answer to a message that could not be read (Raised) is its error."""
        if isinstance(message, Raised):
            return message
        if isinstance(message, CallMessage):
            return run(lambda: getattr(self._worker, message.method)(*message.args))
        return run(self._construct, message)

    def _construct(self, message: ConstructMessage) -> None:
        os.environ.update(message.env)
        self._worker = load_class(message.class_path)(*message.args)


def is_controller() -> bool:
    """Return True in the process that runs the controller; the other ranks call `serve`."""
    return os.environ.get("RANK", "0") == "0"


def socket_path() -> Path:
    """Path of the controller's socket, derived from the process id of torchrun, the parent of all ranks.

    In /tmp if the system's limit for paths of sockets (`man 7 unix`) is below the length of a path in TMPDIR.
    """
    path = Path(tempfile.gettempdir()) / f"megarl-{os.getuid()}-{os.getppid()}" / "control"
    return path if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH else Path("/tmp", *path.parts[-2:])


def serve(log_dir: Path) -> None:
    """Serve the controller's calls until `StopMessage`; for ranks other than 0.

    Ends the process, with a line on stderr, if the controller ends. Output goes to ``log_dir/trainer-<rank>.log``.
    """
    ignore_interrupt()
    die_with_parent(signal.SIGKILL)
    rank = int(os.environ["RANK"])
    place = ProcessInfo(f"trainer rank {rank}", pid=os.getpid(), log=str(log_dir / f"trainer-{rank}.log"))
    wire = _connect(place)
    # torchrun sends SIGTERM to every rank after a death; the controller reports the dead rank and ends this one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    console = os.dup(2)
    redirect_output(place.log, place.name)
    serve_stacks()
    wire.send((rank, place))
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(wire, messages, place.name, console), daemon=True).start()
    worker = RankWorker()
    while not isinstance(message := messages.get(), StopMessage):
        outcome = worker.answer(message)
        if isinstance(outcome, Raised):
            print(outcome.traceback, file=sys.stderr)
        try:
            wire.send(outcome)
        except OSError:
            continue  # the controller has ended: the reader thread ends this process
        except Exception as error:  # noqa: BLE001 -- the result does not pickle
            wire.send(Raised.of(error))


def _read_calls(wire: Wire, messages: queue.SimpleQueue[Any], name: str, console: int) -> None:
    message = None
    while not isinstance(message, StopMessage):
        try:
            message = wire.receive()
        except EOFError:
            os.write(console, f"megarl: {name} ends: the controller (rank 0) has ended.\n".encode())
            os._exit(1)  # the main thread may be in a collective that cannot complete
        except UnreadableMessage as error:
            message = Raised.of(error)
        if isinstance(message, StopMessage) and message.now:
            os._exit(0)  # the controller reports the failure, by message and exit status
        messages.put(message)


def _connect(place: ProcessInfo) -> Wire:
    path, deadline = socket_path(), time.monotonic() + JOIN_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return Wire(connection)
        except (FileNotFoundError, ConnectionRefusedError) as error:  # rank 0 is still importing
            connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{place.name}: the controller (rank 0) did not listen at {path} within {JOIN_SECONDS:.0f} s."
                ) from error
            time.sleep(0.05)
