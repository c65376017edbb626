"""Failures of processes, reported once with the first cause. `ray/` and `torchrun/` detect them.

The run then ends, unless the process is not essential (`Cluster.start_trainers`, `Cluster.start_service`).

A trainer that dies makes its peers fail in their collective. `collect` therefore waits a moment for further
failures and reports one that is not a broken connection, if there is any.
"""

from __future__ import annotations

import math
import re
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cluster.base import host_name
from megarl.errors import ProcessFailure, pluralize
from megarl.platform.kinds import KINDS

GRACE = 0.3  # seconds to wait for other ranks after the first cause, to count equal failures
COMMUNICATION_GRACE = 2.0  # seconds to wait for the cause after a broken connection
TAIL_LINES = 15
_TAIL_BYTES = 65536
_STATISTICS = "[state-dump]"  # in lines of statistics that a raylet and the GCS print about themselves
HEADER = "=== megarl:"  # first line of each process in its log file

_COMMUNICATION = re.compile(
    r"Dist(Backend|Network|Store)?Error|Connection (closed by|reset by|refused)|Broken pipe"
    rf"|{'|'.join(kind.collective for kind in KINDS)}"
    r"|(Socket|Read|recv|wait)\w* ?time?d? ?out|Timed out waiting|TCPStore|recvValue|sendBytes|recvBytes",
    re.IGNORECASE,
)


def is_communication_error(cause: str) -> bool:
    """Return True for an error that another rank's end may have caused (broken connection, timeout). cause: "ValueError: ..."."""
    return _COMMUNICATION.search(cause) is not None


@dataclass(frozen=True)
class Returned:
    """The return value of a call."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """An exception of a call, as text: its class may not exist in the receiving process, or may not pickle."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), text)


def run(function: Callable[..., Any], *args: Any) -> Returned | Raised:
    """Call `function` and return its value or its exception."""
    try:
        return Returned(function(*args))
    except Exception as error:  # noqa: BLE001 -- the controller reports it
        return Raised.of(error)


@dataclass(frozen=True)
class ProcessInfo:
    """A process: its name, machine, process id and log file, for messages."""

    name: str  # "trainer rank 3", "service engine0"
    host: str = field(default_factory=host_name)
    pid: int = 0  # 0: unknown
    log: str = ""  # path of its output file; "" if it writes to the console

    def __str__(self) -> str:
        return f"{self.name} on {self.host}" + (f" (pid {self.pid})" if self.pid else "")


@dataclass(frozen=True)
class Failure:
    """A failed process and the cause. `traceback` is the remote traceback; "" if the process died."""

    place: ProcessInfo
    cause: str  # "ValueError: ...", or how the process died
    died: bool = False
    traceback: str = ""

    @classmethod
    def raised(cls, place: ProcessInfo, error: Raised) -> Failure:
        return cls(place, f"{error.type}: {error.message}", traceback=error.traceback)

    @classmethod
    def death(cls, place: ProcessInfo, cause: str) -> Failure:
        return cls(place, cause, died=True)

    @property
    def is_communication(self) -> bool:
        """See `is_communication_error`."""
        return not self.died and is_communication_error(self.cause)

    def __str__(self) -> str:
        text = f"{self.place} {'died' if self.died else 'failed'}: {self.cause}"
        if self.place.log:
            # A process without an id has not opened its log yet: the last lines are an earlier process's.
            tail = log_tail(self.place.log) if self.died and self.place.pid else ""
            text += f"\nIts output: {self.place.log}" + (f", which ends:\n{tail}" if tail else "")
        return text


class ClusterError(ProcessFailure):
    """A process failed. `failure` holds the remote traceback. `note`: text behind it, with its line break."""

    def __init__(self, failure: Failure, note: str = "") -> None:
        super().__init__(f"{failure}{note}")
        self.failure, self.note = failure, note


class WorkerFailed(ClusterError):
    """A trainer raised or died."""


class ServiceDied(ClusterError):
    """A service's process has ended, or the constructor of its object raised."""


class TooFewEngines(ServiceDied):
    """Too few engines are alive for the run to go on: fewer than `rollout.min_engines`, or none of a teacher or the judge."""


class MachineLost(ProcessFailure):
    """The machine of a process has left the cluster, and no other one has enough free devices for a new process."""


class SamplesLost(ProcessFailure):
    """The machine that stored token vectors has left the cluster before they were read."""


class CallFailed(ClusterError):
    """One call to a service raised; the service is still running."""


def exit_cause(returncode: int) -> str:
    """Describe how a process ended. `returncode`: as in ``Popen.returncode``."""
    if returncode >= 0:
        return f"its process exited with code {returncode}"
    name = signal.Signals(-returncode).name
    hint = ", as the kernel does when memory runs out" if -returncode == signal.SIGKILL else ""
    return f"its process was killed by signal {-returncode} ({name}){hint}"


def log_tail(log: str, lines: int = TAIL_LINES) -> str:
    """Return the last lines that the newest process wrote to `log`, without Ray's statistics; "" if the file is on another machine."""
    path = Path(log)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        begin = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(begin)
        text = file.read().decode(errors="replace").splitlines()[bool(begin) :]  # the first line may be cut
    text = [line for line in text if _STATISTICS not in line]
    starts = [i for i, line in enumerate(text) if line.startswith(HEADER)]
    return "\n".join("  " + line for line in text[starts[-1] + 1 if starts else 0 :][-lines:])


def collect(
    size: int,
    poll: Callable[[set[int], float], list[tuple[int, Returned | Failure]]],
    check: Callable[[], None],
    ranks: Collection[int] | None = None,
) -> list[Any]:
    """Wait for all ranks, or for `ranks`, and return their values in rank order: None for the others.

    ``poll(ranks, seconds)`` waits at most `seconds` and returns the new outcomes of `ranks`.
    `check` raises if a process that the ranks may be waiting for has failed.
    Raises WorkerFailed with the first cause.
    """
    pending, values, failures = set(range(size) if ranks is None else ranks), [None] * size, []
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
    """Exception for the first failure that is not a broken connection, with the number of ranks that failed alike."""
    cause = next((failure for failure in failures if not failure.is_communication), failures[0])
    same = sum(failure.cause == cause.cause for failure in failures) - 1
    return WorkerFailed(cause, f"\n{pluralize(same, 'other rank')} failed alike." if same else "")
