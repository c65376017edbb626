"""Requests to a live run from another process: the controller answers on its socket, also while it waits for trainers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megarl.cluster.base import Cluster
from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks.capture import capture
from megarl.cluster.stacks.channel import answering, receive, request, request_words, with_system_facts
from megarl.cluster.stacks.report import GroupStacks

# Time for the controller to answer. It waits for nodes of a Ray cluster, and these for py-spy.
LIVE_RUN_SECONDS = 120.0


WORDS_SECONDS = 20.0  # time for the controller to answer a request with words


@contextlib.contextmanager
def answering_requests(cluster: Cluster) -> Iterator[None]:
    """Answer `read_live_run` and `ask_live_run` while the block runs. Call it in the controller."""

    def answer(_full: bool) -> list[dict[str, object]]:
        place = ProcessInfo("controller", pid=os.getpid())
        state = with_system_facts(place.pid, capture(True, main_thread=True), True)
        return [asdict(group) for group in [GroupStacks("controller", [place], [state]), *cluster.stacks()]]

    def answer_words(words: list[str]) -> Any:
        if not words or words[0] not in cluster.requests:
            return {"refused": "it has not started its engines yet, or has none: try again once its first step runs"}
        return cluster.requests[words[0]](words[1:])

    with answering(answer, answer_words):
        yield


def ask_live_run(pid: int, user: int, words: Sequence[str]) -> dict[str, Any]:
    """Return the answer of the run with controller `pid` to a request: what `Cluster.requests` has for its first word.

    Raises RuntimeError if the controller cannot answer. TimeoutError and other OSErrors: see `receive` and `request_words`.
    """
    answer: dict[str, Any] = receive(request_words(pid, user, words), time.monotonic() + WORDS_SECONDS)
    if "problem" in answer:
        raise RuntimeError(f"the controller (pid {pid}) cannot answer {' '.join(words)!r}: {answer['problem']}")
    return answer


def read_live_run(pid: int, user: int) -> list[GroupStacks]:
    """Return the states of the processes of the run with controller `pid`: controller, groups of trainers, services.

    Raises RuntimeError if the controller cannot answer. TimeoutError and other OSErrors: see `receive` and `request`.
    """
    answer = receive(request(pid, user, True), time.monotonic() + LIVE_RUN_SECONDS)
    if isinstance(answer, dict):
        raise RuntimeError(f"the controller (pid {pid}) cannot read the stacks of the run: {answer['problem']}")
    return [GroupStacks.from_json(group) for group in answer]
