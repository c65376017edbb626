"""Trainers that were stopped (SIGSTOP, or Ctrl-Z in a session of their own) while a call is waited for.

Such a process holds its memory, its device and its connections, so that nothing tells of it until a collective of the others
gives up (`cluster.timeout`). The kernel knows: each process is looked at from another one of its machine, which a trainer
that is merely busy, or that lets none of its threads run, cannot mislead. A machine that is gone gives no answer here; over
Ray its processes are then told as dead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megarl.cluster.failures import Failure, Place, WorkerFailed

LOOK_SECONDS = 2.0  # between two looks; shorter calls are over before the first one
# Looks in a row that find a process stopped until it counts as lost, 20 s. Counted, not timed, so that a controller that
# was stopped as well (Ctrl-Z, a job that is suspended) takes its own pause for nobody's.
LOOKS = 10


def stopped_of(pids: Sequence[int]) -> list[int]:
    """Those of these processes of this machine that are stopped. One that a debugger holds is not: somebody is at it."""
    return [pid for pid in pids if _state(pid) == "T"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:  # ended, which others tell
        return ""


class Looks:
    """What looks at the processes of one call have found. `doing`: the call's name, for messages."""

    def __init__(self, places: Sequence[Place], doing: str) -> None:
        self._places, self._doing = places, doing
        self._found = [0] * len(places)  # looks in a row, by rank
        self._next = time.monotonic() + LOOK_SECONDS

    def due(self) -> bool:
        """Whether it is time for the next look, which is then taken to be done."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_SECONDS
        return True

    def note(self, ranks: Sequence[int], stopped: Sequence[int]) -> None:
        """A look at `ranks` has found the processes `stopped`. Raises WorkerFailed for one that has been so for too long."""
        for rank in ranks:
            place = self._places[rank]
            self._found[rank] = self._found[rank] + 1 if place.pid in stopped else 0
            if self._found[rank] >= LOOKS:
                raise WorkerFailed(Failure(place, self._cause(place)))

    def _cause(self, place: Place) -> str:
        return (
            f"its process has been stopped for {LOOKS * LOOK_SECONDS:.0f} s in {self._doing}, as by SIGSTOP or Ctrl-Z, and "
            f"all others wait for it. Who stops processes on {place.host}?"
        )


class LocalWatch:
    """Of processes on this machine."""

    def __init__(self, places: Sequence[Place], doing: str) -> None:
        self._places, self._looks = places, Looks(places, doing)

    def check(self) -> None:
        """Raise WorkerFailed where one is stopped. To be called often; looks when it is time."""
        if self._looks.due():
            self._looks.note(range(len(self._places)), stopped_of([place.pid for place in self._places]))
