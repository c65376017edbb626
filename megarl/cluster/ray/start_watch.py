"""Watch over Ray's processes before their first reply: it finds their process ids, and stopped or ended processes.

Ray starts another process a minute after the first one has ended before it was registered, and says nothing of a stopped one. Call
`ray.env.prepare` before importing this module.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.cluster import sigstop_watch
from megarl.cluster.failures import Failure, ProcessInfo
from megarl.cluster.ray.signals import ray_get, ray_wait
from megarl.cluster.ray.watch import on_node
from megarl.cluster.starting import StartingProcess, find_starting, kill_starting

logger = logging.getLogger(__name__)

GONE_LOOKS = 3  # looks without a process that was seen, until it counts as ended: Ray may start another one at once
KILL_SECONDS = 5.0  # for another machine to kill a process
NOTICE_SECONDS = 60.0  # between messages about a process that does not report its place


class StartWatch:
    """Looks at starting processes. private: all of them are on this machine. limit: seconds until the caller gives up, for messages."""

    def __init__(self, *, private: bool, limit: float) -> None:
        self._private, self._limit, self._next = private, limit, 0.0
        self._looks: dict[str, tuple[list[str], Any]] = {}  # by node: marks, and the reference of the unread look
        self._seen: dict[str, StartingProcess] = {}  # by mark; the newest
        self._stopped: Counter[str] = Counter()  # consecutive looks, by mark
        self._gone: Counter[str] = Counter()
        self._since: dict[str, tuple[float, float]] = {}  # by mark: first look, and time of the next message

    def look(self, starting: Mapping[str, str]) -> None:
        """Look if it is time; never waits for a node. starting: mark of each process -> id of its node. Call it often."""
        now = time.monotonic()
        if not starting or now < self._next:
            return
        self._next = now + sigstop_watch.LOOK_SECONDS
        for mark in self._since.keys() - starting.keys():  # these have replied, or were given up
            for values in (self._since, self._seen, self._stopped, self._gone):
                values.pop(mark, None)
        for mark in starting:
            self._since.setdefault(mark, (now, now + NOTICE_SECONDS))
        if self._private:
            self._record([*starting], find_starting(starting))
            return
        for node in dict.fromkeys(starting.values()):
            if node in self._looks:
                looked, ref = self._looks[node]
                if not ray_wait([ref], timeout=0)[0]:
                    continue
                self._read(looked, ref)
            marks = [mark for mark, home in starting.items() if home == node]
            self._looks[node] = marks, _FIND.options(scheduling_strategy=on_node(node)).remote(marks)

    def _read(self, marks: list[str], look: Any) -> None:
        try:
            seen = ray_get(look)
        except RayError:  # the node is lost or cannot start a process; the cluster reports a lost node
            return
        self._record(marks, seen)

    def _record(self, marks: list[str], seen: Mapping[str, StartingProcess]) -> None:
        for mark in [mark for mark in marks if mark in self._since]:
            process = seen.get(mark)
            self._gone[mark] = self._gone[mark] + 1 if process is None and mark in self._seen else 0
            self._stopped[mark] = self._stopped[mark] + 1 if process is not None and process.state == "T" else 0
            if process is not None:
                self._seen[mark] = process

    def place(self, mark: str, place: ProcessInfo) -> ProcessInfo:
        """Return `place` with host, process id and output file of the process, if it was seen."""
        process = self._seen.get(mark)
        if process is None:
            return place
        return replace(place, host=process.host, pid=process.pid, log=process.log)

    def failure(self, mark: str, place: ProcessInfo) -> Failure | None:
        """Return the failure of a process that stays stopped or has ended; None if it may still reply. Prints a message about
        every `NOTICE_SECONDS` while it does not."""
        named, reported = self.place(mark, place), "before it has reported its start"
        if self._stopped[mark] >= sigstop_watch.LOOKS:
            seconds = sigstop_watch.LOOKS * sigstop_watch.LOOK_SECONDS
            return Failure(
                named,
                f"its process has been stopped for {seconds:.0f} s {reported}, as by SIGSTOP or Ctrl-Z. "
                f"Check what stops processes on {named.host}.",
            )
        if self._gone[mark] >= GONE_LOOKS:
            return Failure.death(named, f"its process ended {reported}: killed, or an error in its start")
        self._notify(mark, named)
        return None

    def kill(self, mark: str, node: str, *, wait: bool) -> None:
        """Kill a process that has failed: Ray does not end one that is stopped before its reply.

        wait: for another machine's answer, `KILL_SECONDS` at most, because a run that ends takes its unfinished tasks with it.
        """
        if self._private:
            kill_starting(mark)
            return
        killed = _KILL.options(scheduling_strategy=on_node(node)).remote(mark)
        if wait:
            ray_wait([killed], timeout=KILL_SECONDS)

    def _notify(self, mark: str, place: ProcessInfo) -> None:
        began, due = self._since.get(mark, (0.0, float("inf")))
        now = time.monotonic()
        if now < due:
            return
        self._since[mark] = began, now + NOTICE_SECONDS
        if mark in self._seen:
            where = f"Its process runs, in state {self._seen[mark].state}; its output: {place.log or 'none yet'}."
        else:
            where = (
                "megarl has not found its process on its machine: Ray has not started it (`ray status` shows what Ray waits "
                "for), or it runs as another user."
            )
        text = "megarl has waited %.0f s for the start of %s, and waits for at most %.0f s. %s"
        logger.warning(text, now - began, place, self._limit, where)


# Created once: Ray keeps every remote function, with its pickled code, for the lifetime of the cluster.
_FIND = ray.remote(num_cpus=0, max_retries=0)(find_starting)
_KILL = ray.remote(num_cpus=0, max_retries=0)(kill_starting)
