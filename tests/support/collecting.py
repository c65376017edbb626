"""Finished groups of a rollout process in tests: from a stand-in of a process, and from a `RolloutServer` without a handle."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from megarl.cluster.failures import CallFailed, Failure, ProcessInfo, Raised, ServiceDied
from megarl.rollout.server import RolloutServer
from megarl.types import Group, SampleTokens


class CollectedService:
    """Part of a stand-in of an engine's process: it returns the groups that the test has answered, several with one call.

    The stand-in calls `promise` for each submitted group. An answer is the group with its vectors, or an exception. `ServiceDied`
    fails the call, as the end of a process does, and any other exception only the group.
    """

    name = "engine0"

    def __init__(self) -> None:
        self.known_place = ProcessInfo(f"service {self.name}", "host", 7)
        self.replies: list[list[int]] = []  # groups of each reply
        self._answers: deque[tuple[int, Any]] = deque()
        self._calls: deque[tuple[int, Future[Any]]] = deque()
        self._answer_lock = threading.Lock()

    def promise(self, number: int, answer: Future[Any]) -> None:
        """Return a group as soon as `answer` is done."""
        answer.add_done_callback(functools.partial(self._answered, number))

    def call_with_parts(self, method: str, parts: int) -> Future[Any]:
        assert method == "collect" and parts > 0
        call: Future[Any] = Future()
        with self._answer_lock:
            self._calls.append((parts, call))
            assert len(self._calls) == 1, "one call at a time"
        self._reply()
        return call

    def _answered(self, number: int, answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, ServiceDied):
            with self._answer_lock:
                calls = [call for _, call in self._calls]
                self._calls.clear()
            for call in calls:
                call.set_exception(error)
            return
        with self._answer_lock:
            self._answers.append((number, answer.result() if error is None else raised_as(error)))
        self._reply()

    def _reply(self) -> None:
        with self._answer_lock:
            if not (self._calls and self._answers):
                return
            parts, call = self._calls.popleft()
            taken = [self._answers.popleft() for _ in range(min(parts, len(self._answers)))]
            self.replies.append([number for number, _ in taken])
        control = [(number, each if isinstance(each, Raised) else each[0]) for number, each in taken]
        call.set_result((control, [each[1] for _, each in taken if not isinstance(each, Raised)]))


def raised_as(error: BaseException) -> Raised:
    """Return what a process sends for an exception. A `CallFailed` stands for the exception of its cause."""
    if not isinstance(error, CallFailed):
        return Raised.of(error)
    kind, _, message = error.failure.cause.partition(": ")
    return Raised(kind, message, "")


class CollectedGroups:
    """The groups of a server that runs in this process, one by one. Use it from the server's loop."""

    def __init__(self, server: RolloutServer) -> None:
        self._server = server
        self._finished: dict[int, Group | Raised] = {}
        self._vectors: dict[int, list[SampleTokens]] = {}
        self._lock = asyncio.Lock()

    async def collect(self, number: int) -> tuple[Group, list[SampleTokens]]:
        """Wait for a group; returns it with its vectors. Raises CallFailed with the error of its sampling or scoring."""
        while number not in self._finished:
            async with self._lock:
                if number not in self._finished:
                    control, vectors = await self._server.collect(2)
                    self._finished |= dict(control)
                    scored = [each for each, group in control if isinstance(group, Group)]
                    self._vectors |= dict(zip(scored, vectors, strict=True))
        group = self._finished.pop(number)
        if isinstance(group, Raised):
            raise CallFailed(Failure.raised(ProcessInfo("service engine0", "host", 7), group))
        return group, self._vectors.pop(number)
