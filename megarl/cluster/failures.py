"""One failure, told once: who failed first, where, and why.

A trainer that dies makes its peers fail too, in the collective they were in. What the user needs is
the first cause, so `collect` waits a moment for the others and prefers what is not a broken connection.
"""

from __future__ import annotations

import math
import re
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cluster.base import host_name
from megarl.platform.kinds import KINDS
from megarl.text import pluralize

GRACE = 0.3  # seconds left to other ranks once a cause is known, so that the message can count them
COMMUNICATION_GRACE = 2.0  # seconds left for a cause to show after a broken connection
TAIL_LINES = 15
HEADER = "=== megarl:"  # first line of each process in its log file

_COMMUNICATION = re.compile(
    r"Dist(Backend|Network|Store)?Error|Connection (closed by|reset by|refused)|Broken pipe"
    rf"|{'|'.join(kind.collective for kind in KINDS)}"
    r"|(Socket|Read|recv|wait)\w* ?time?d? ?out|Timed out waiting|TCPStore|recvValue|sendBytes|recvBytes",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Returned:
    """What a call returned."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """What a call raised, as text: the exception's class need not exist, or pickle, elsewhere."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), text)


def run(function: Callable[..., Any], *args: Any) -> Returned | Raised:
    """Call `function`; what it returned or raised."""
    try:
        return Returned(function(*args))
    except Exception as error:  # noqa: BLE001 -- it is told to the controller
        return Raised.of(error)


@dataclass(frozen=True)
class Place:
    """A process, as messages name it."""

    who: str  # "trainer rank 3", "service engine0"
    host: str = field(default_factory=host_name)
    pid: int = 0  # 0: not known
    log: str = ""  # file of its output; "" where it has none of its own

    def __str__(self) -> str:
        return f"{self.who} on {self.host}" + (f" (pid {self.pid})" if self.pid else "")


@dataclass(frozen=True)
class Failure:
    """Why a process failed. `traceback` is the remote one; "" where the process died."""

    place: Place
    cause: str  # "ValueError: ...", or how the process died
    died: bool = False
    traceback: str = ""

    @classmethod
    def raised(cls, place: Place, error: Raised) -> Failure:
        return cls(place, f"{error.type}: {error.message}", traceback=error.traceback)

    @classmethod
    def death(cls, place: Place, cause: str) -> Failure:
        return cls(place, cause, died=True)

    @property
    def is_communication(self) -> bool:
        """True for what a rank meets when another one is gone."""
        return not self.died and _COMMUNICATION.search(self.cause) is not None

    def __str__(self) -> str:
        text = f"{self.place} {'died' if self.died else 'failed'}: {self.cause}"
        if self.place.log:
            tail = log_tail(self.place.log) if self.died else ""
            text += f"\nIts output: {self.place.log}" + (f", which ends:\n{tail}" if tail else "")
        return text


class ClusterError(RuntimeError):
    """A process failed. `failure` holds the remote traceback, for those who want it."""

    def __init__(self, failure: Failure, note: str = "") -> None:
        super().__init__(f"{failure}{note}")
        self.failure = failure


class WorkerFailed(ClusterError):
    """A trainer raised or died."""


class ServiceDied(ClusterError):
    """A service's process is gone, or its object could not be constructed."""


class CallFailed(ClusterError):
    """One call to a service raised; the service lives on."""


def exit_cause(returncode: int) -> str:
    """How a process ended, from what ``Popen.returncode`` says."""
    if returncode >= 0:
        return f"its process exited with code {returncode}"
    name = signal.Signals(-returncode).name
    hint = ", as the kernel does when memory runs out" if -returncode == signal.SIGKILL else ""
    return f"its process was killed by signal {-returncode} ({name}){hint}"


def log_tail(log: str, lines: int = TAIL_LINES) -> str:
    """The last lines that the newest process wrote to `log`; "" where the file cannot be read from here."""
    path = Path(log)
    if not path.is_file():
        return ""  # on another machine's disk
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        text = file.read().decode(errors="replace").splitlines()
    starts = [i for i, line in enumerate(text) if line.startswith(HEADER)]
    return "\n".join("  " + line for line in text[starts[-1] + 1 if starts else 0 :][-lines:])


def collect(
    size: int,
    poll: Callable[[set[int], float], list[tuple[int, Returned | Failure]]],
    check: Callable[[], None],
) -> list[Any]:
    """What every rank returned, in rank order.

    ``poll(ranks, seconds)`` gives what has come from some of `ranks`, waiting at most so long.
    `check` raises where something else has failed that the ranks may be waiting for.
    Raises WorkerFailed with the first cause.
    """
    pending, values, failures = set(range(size)), [None] * size, []
    deadline = math.inf
    while pending and time.monotonic() < deadline:
        for rank, outcome in poll(pending, 0.2):
            pending.discard(rank)
            if isinstance(outcome, Returned):
                values[rank] = outcome.value
            else:
                failures.append(outcome)
                grace = COMMUNICATION_GRACE if outcome.is_communication else GRACE
                deadline = min(deadline, time.monotonic() + grace)
        if all(failure.is_communication for failure in failures):
            check()
    if failures:
        raise worker_failed(failures)
    return values


def worker_failed(failures: list[Failure]) -> WorkerFailed:
    """The first failure that is no mere consequence, and how many ranks say the same."""
    cause = next((failure for failure in failures if not failure.is_communication), failures[0])
    same = sum(failure.cause == cause.cause for failure in failures) - 1
    return WorkerFailed(cause, f"\n{pluralize(same, 'other rank')} failed alike." if same else "")
