"""Collect the groups of an engine's process: one call at a time, whose reply has all groups that have finished meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from megarl.cluster.base import Service
from megarl.cluster.failures import CallFailed, ClusterError, Failure, Raised
from megarl.engines.base import EngineDead
from megarl.errors import add_note, pluralize
from megarl.rollout.collect.finished import FinishedGroup
from megarl.types import DataRef, Group

MOST_GROUPS = 32  # of one reply
_NAMED_GROUPS = 5  # in an error of a whole reply

Collected = tuple[Group, DataRef]
"""Control data of a group, and the location of its vectors."""
Reply = tuple[list[FinishedGroup], list[DataRef]]
"""Finished groups, and the locations of the vectors of the scored ones, in the same order."""


class GroupCollector:
    """Distributes the replies of a process to the groups that the controller waits for.

    A call costs the controller much more than a group. The next call starts when the groups of a reply have been handled, so
    groups share calls where the controller is busy, and do not wait for others where it is idle. Each group has a separate
    DataRef. Thread-safe.
    """

    def __init__(self, service: Service, call: Callable[[int], Future[Reply]]) -> None:
        """service: the rollout process. call: starts a call of it for at most so many finished groups. A process has one collector."""
        self.service, self._start_call = service, call
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Future[Collected]]] = {}  # by group; the results of a group arrive in order
        self._early: dict[int, deque[Future[Collected]]] = {}  # of groups that arrived before `collect`
        self._is_calling = False
        self._most = 1

    def collect(self, group: int) -> Future[Collected]:
        """Wait for a group that is submitted to the process; the result raises CallFailed if it failed, and ServiceDied if the
        process has died. An error of a whole reply names the groups that waited. The result cannot be cancelled."""
        result = _promise()
        with self._lock:
            if group in self._early:
                return _pop(self._early, group)
            self._waiting.setdefault(group, deque()).append(result)
            is_first, self._is_calling = not self._is_calling, True
        if is_first:
            try:
                self._call()
            except BaseException as error:  # noqa: BLE001 -- every group that waits raises it, and the next `collect` calls again
                self._fail(error)
        return result

    def _call(self) -> None:
        """Start a call for at most twice the groups of the last reply: each place that stays empty costs time, too."""
        with self._lock:
            most = min(self._most, MOST_GROUPS, len(self._waiting))
        self._start_call(most).add_done_callback(self._received)

    def _received(self, call: Future[Reply]) -> None:
        """Distribute a reply, in a thread of the transport."""
        try:
            finished, data = call.result()
            self._distribute(finished, data)
            with self._lock:
                self._most = 2 * len(finished)
                self._is_calling = calls_again = bool(self._waiting)
            if calls_again:
                self._call()
        except BaseException as error:  # noqa: BLE001 -- every group that still waits raises it
            self._fail(error)

    def _distribute(self, finished: list[FinishedGroup], data: list[DataRef]) -> None:
        scored = [group for _, group in finished if isinstance(group, Group)]
        collected = zip(scored, data, strict=True)
        for number, group in finished:
            result = self._take(number)
            if isinstance(group, Raised):
                result.set_exception(self._error(number, group))
            else:
                result.set_result(next(collected))

    def _take(self, number: int) -> Future[Collected]:
        with self._lock:
            if number in self._waiting:
                return _pop(self._waiting, number)
            result = _promise()
            self._early.setdefault(number, deque()).append(result)
            return result

    def _error(self, number: int, error: Raised) -> CallFailed:
        """Return the error of a group. It names the group, unless the whole engine has failed."""
        message = error.message if error.type == EngineDead.__name__ else f"group {number}: {error.message}"
        raised = Raised(error.type, message, error.traceback)
        return CallFailed(Failure.raised(self.service.known_place, raised))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._is_calling = False
        error = self._naming_groups(error, sorted(waiting))
        for results in waiting.values():
            for result in results:
                result.set_exception(error)

    def _naming_groups(self, error: BaseException, groups: list[int]) -> BaseException:
        """Return the error of a whole reply with the engine and the groups that waited for it. It has the same type."""
        few, more = ", ".join(map(str, groups[:_NAMED_GROUPS])), len(groups) - _NAMED_GROUPS
        named = f"{pluralize(len(groups), 'group')}: {few}{f' and {more:,} more' if more > 0 else ''}"
        note = f"{self.service.known_place} had not returned {named}"
        if isinstance(error, ClusterError):  # other calls may have the same error
            return type(error)(error.failure, f"{error.note}\n{note}").with_traceback(error.__traceback__)
        add_note(error, note)
        return error


def _promise() -> Future[Collected]:
    """Return a future that cannot be cancelled: a reply has the results of several groups."""
    result: Future[Collected] = Future()
    result.set_running_or_notify_cancel()
    return result


def _pop(results: dict[int, deque[Future[Collected]]], number: int) -> Future[Collected]:
    result = results[number].popleft()
    if not results[number]:
        del results[number]
    return result
