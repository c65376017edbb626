"""End a call to the trainers in which nothing changes for `cluster.stall` seconds, with a report of who waits for whom.

A look reads the stacks of all ranks. A call makes progress if between two looks, on any rank, a stack or the count of its
collectives changes, it reads or writes a file, or its child processes compute (compilers). Ranks that wait for an engine in a
weight update, or for a disk to take what was written, have other limits and count as progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from megarl.cluster.failures import Failure, WorkerFailed, log_tail
from megarl.cluster.stacks.capture import ProcessStacks
from megarl.cluster.stacks.report import GroupStacks, lines_of, situation

# Looks within `cluster.stall`. Counted instead of timed, so that a pause of the controller itself does not count.
LOOKS = 4
_BYTES = 1 << 20  # that a process reads or writes between two looks without progress, such as lines of a log
_TICKS = 100  # clock ticks (10 ms) that its children compute without progress


class TrainersStalled(WorkerFailed):
    """Nothing changes in a call to the trainers. `failure` names the first rank that others wait for."""

    def __init__(self, group: GroupStacks, seconds: float) -> None:
        state = situation(group)
        place = group.places[(state.missing or state.waiting or [0])[0]]
        reason = "others wait for it" if state.missing and state.waiting else "it does not go on"
        cause = f"{reason} in {group.call}, where nothing has changed on any rank for {seconds:.0f} s (cluster.stall)."
        lines = [cause, *lines_of(group, log_tail), "what to do:", f"  {_advice(group)}"]
        super().__init__(Failure(replace(place, log=""), "\n".join(lines)))  # the lines have its output


def _advice(group: GroupStacks) -> str:
    state = situation(group)
    if not state.missing:
        return (
            "All ranks are in a collective. If they are in the same one, check the network and the devices between these "
            "hosts. If not, their code takes different branches: compare the functions above."
        )
    first = group.stacks[state.missing[0]]
    if first["problem"] or first["state"] == "D":
        return (
            f"Find what blocks this process on {group.places[state.missing[0]].host}: `dmesg`, the mounts of its files, and "
            "`py-spy dump --native --pid PID` (pip install py-spy) while the next run hangs."
        )
    return (
        "The first line under a rank is the line that it executes. If that work is only slow, set cluster.stall higher; "
        "`megarl doctor RUN_DIRECTORY` shows the same picture of a run at any time."
    )


class StallWatch:
    """Watches one call. `read(full)` reads the states of its ranks, which takes seconds. limit: `cluster.stall`, in seconds."""

    def __init__(self, read: Callable[[bool], GroupStacks], limit: float) -> None:
        self._read, self._limit = read, limit
        self._next = time.monotonic() + limit / LOOKS
        self._look: Future[GroupStacks] | None = None  # in progress
        self._last: GroupStacks | None = None
        self._unchanged = 0

    def check(self) -> None:
        """Raise TrainersStalled if `LOOKS` looks in a row see no progress. Call it often; it looks when due, in a thread."""
        if not self._limit:
            return
        if self._look is None:
            if time.monotonic() >= self._next:
                self._look = _in_thread(self._read)
            return
        if not self._look.done():
            return
        look, self._look = self._look.result(), None
        self._next = time.monotonic() + self._limit / LOOKS
        self._unchanged = 0 if self._last is None or progress(self._last, look) else self._unchanged + 1
        self._last = look
        if self._unchanged >= LOOKS:
            self._last = self._read(True)
            if not progress(look, self._last):
                raise TrainersStalled(self._last, self._limit)
            self._unchanged = 0


def progress(before: GroupStacks, now: GroupStacks) -> bool:
    """Return whether any rank made progress between two looks.

    A rank that waits for an engine or a disk has another time limit, so it counts as progress while all ranks answer. If one does
    not answer, the wait may be for that rank: in an update of the weights, engines need the slices of each trainer. Such a rank runs
    a loop: its stack changes, and it reads and writes, although nothing progresses.
    """
    all_answer = not any(rank["problem"] for rank in now.stacks)
    return any(_moved(*ranks, all_answer) for ranks in zip(before.stacks, now.stacks, strict=True))


def _moved(before: ProcessStacks, now: ProcessStacks, all_answer: bool) -> bool:
    if now.get("other_limit"):
        return all_answer
    if before.get("digest") != now.get("digest"):
        return True
    return now["io_bytes"] - before["io_bytes"] > _BYTES or now["cpu_ticks"] - before["cpu_ticks"] > _TICKS


def _in_thread(read: Callable[[bool], GroupStacks]) -> Future[GroupStacks]:
    result: Future[GroupStacks] = Future()

    def run() -> None:
        try:
            result.set_result(read(False))
        except BaseException as error:  # noqa: BLE001 -- `check` raises it
            result.set_exception(error)

    threading.Thread(target=run, name="megarl-stall", daemon=True).start()
    return result
