"""Read the stacks of a live run from another process: the controller answers on its socket, also while it waits for trainers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict

from megarl.cluster.base import Cluster
from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks.capture import capture
from megarl.cluster.stacks.channel import answering, receive, request, with_system_facts
from megarl.cluster.stacks.report import GroupStacks

# Time for the controller to answer. It waits for nodes of a Ray cluster, and these for py-spy.
LIVE_RUN_SECONDS = 120.0


@contextlib.contextmanager
def answering_doctor(cluster: Cluster) -> Iterator[None]:
    """Answer `read_live_run` while the block runs. Call it in the controller."""

    def answer(_full: bool) -> list[dict[str, object]]:
        place = ProcessInfo("controller", pid=os.getpid())
        state = with_system_facts(place.pid, capture(True, main_thread=True), True)
        return [asdict(group) for group in [GroupStacks("controller", [place], [state]), *cluster.stacks()]]

    with answering(answer):
        yield


def read_live_run(pid: int, user: int) -> list[GroupStacks]:
    """Return the states of the processes of the run with controller `pid`: controller, groups of trainers, services.

    Raises RuntimeError if the controller cannot answer. TimeoutError and other OSErrors: see `receive` and `request`.
    """
    answer = receive(request(pid, user, True), time.monotonic() + LIVE_RUN_SECONDS)
    if isinstance(answer, dict):
        raise RuntimeError(f"the controller (pid {pid}) cannot read the stacks of the run: {answer['problem']}")
    return [GroupStacks.from_json(group) for group in answer]
