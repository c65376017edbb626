"""Stopped-process watch: detect trainers and engines in state T (SIGSTOP, Ctrl-Z), trainers during a call.

A stopped process keeps its memory, device and connections, so the run would hang until a collective of the other ranks
times out (`cluster.timeout`). A process on the same machine reads the trainers' states from /proc, which tells a stopped
trainer from one that is busy or has hung threads. This watch cannot read the states of a lost machine; Ray reports the
machine's processes as dead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megarl.cluster.failures import ClusterError, Failure, ProcessInfo, WorkerFailed

LOOK_SECONDS = 2.0  # between two looks; shorter calls end before the first look
# Consecutive looks at a stopped process until it counts as lost: 20 s. Counted instead of timed, so that a pause of the
# controller itself (Ctrl-Z, a suspended job) does not count.
LOOKS = 10
_START_TIME = 19  # index in `process_fields`


def stopped_pids(pids: Sequence[int]) -> list[int]:
    """Return those `pids` of this machine that are stopped (state T); a process under a debugger (state t) is not."""
    return [pid for pid in pids if process_fields(pid)[:1] == ["T"]]


def process_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; [] if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:  # the cluster reports it elsewhere
        return []


def start_time(pid: int) -> int:
    """Return when a process of this machine started, in clock ticks since the boot; 0 if it has ended."""
    fields = process_fields(pid)
    return 0 if fields[:1] in ([], ["Z"]) else int(fields[_START_TIME])


class StopDetector:
    """Counts consecutive looks at which a process was stopped, during one call. `doing`: the call's name, for messages.
    `error`: raised for a stopped process."""

    def __init__(self, places: Sequence[ProcessInfo], doing: str, error: type[ClusterError] = WorkerFailed) -> None:
        self._places, self._doing, self._error = places, doing, error
        self._stopped_looks = [0] * len(places)  # consecutive looks, by rank
        self._next = time.monotonic() + LOOK_SECONDS

    def continue_from(self, before: StopDetector) -> None:
        """Take over the counts of an earlier detector, for the processes that both look at."""
        counts = dict(zip(before._places, before._stopped_looks, strict=True))
        self._stopped_looks = [counts.get(place, 0) for place in self._places]
        self._next = before._next

    def due(self) -> bool:
        """Return True if it is time for the next look, and schedule the one after it."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_SECONDS
        return True

    def record(self, ranks: Sequence[int], stopped: Sequence[int]) -> None:
        """Record a look at `ranks`, of which the process ids `stopped` are stopped. Raises `error` after `LOOKS`."""
        for rank in ranks:
            is_stopped = self._places[rank].pid in stopped
            self._stopped_looks[rank] = self._stopped_looks[rank] + 1 if is_stopped else 0
        for rank in ranks:
            if self._stopped_looks[rank] >= LOOKS:
                raise self._error(Failure(self._places[rank], self._cause(self._places[rank])))

    def _cause(self, place: ProcessInfo) -> str:
        return (
            f"its process has been stopped for {LOOKS * LOOK_SECONDS:.0f} s in {self._doing}, as by SIGSTOP or Ctrl-Z, and "
            f"the run waits for it. Check what stops processes on {place.host}."
        )


class LocalWatch:
    """Stopped-process watch over processes of this machine."""

    def __init__(self, places: Sequence[ProcessInfo], doing: str, error: type[ClusterError] = WorkerFailed) -> None:
        self._places, self.detector = places, StopDetector(places, doing, error)

    def check(self) -> None:
        """Raise `error` if a process stays stopped. Call it often; it looks every `LOOK_SECONDS`."""
        if self.detector.due():
            self.detector.record(range(len(self._places)), stopped_pids([place.pid for place in self._places]))
