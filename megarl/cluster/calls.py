"""Wait for calls to engines, with timeouts and checks for dead processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for_futures
from typing import Any, Protocol, TypeVar

from megarl.errors import ProcessFailure, pluralize
from megarl.types import DataRef, Group

T = TypeVar("T")
logger = logging.getLogger(__name__)

NOTICE_SECONDS = 60.0  # between messages about services that have not replied
_POLL_SECONDS = 1.0
_WAITING = (
    "megarl has waited %.0f s for %s to %s (%s = %g s). See logs/%s.log in the run's directory; `megarl doctor RUN` shows what each "
    "process does now."
)


class Named(Protocol):
    """A process with a name for messages."""

    @property
    def name(self) -> str: ...


class StallTimer:
    """Time since the last finished group; fails after `limit` seconds (`rollout.timeout`). `advice`: ends the message. `pauses`:
    returns True while time does not count."""

    def __init__(self, limit: float, advice: str | None = None, pauses: Callable[[], bool] = lambda: False) -> None:
        self.limit, self._pauses = limit, pauses
        self._advice = advice or "See the engines' logs in the run's logs/; raise rollout.timeout if they are slow."
        self.reset()

    def reset(self) -> None:
        """Restart the timer: a group has finished, or the first running group has started."""
        self._since = time.monotonic()

    def check(self, running: int, oldest: str) -> None:
        """Raise ProcessFailure after `limit` seconds. `oldest`: name of the oldest of the `running` groups."""
        if self._pauses():
            self.reset()
        seconds = time.monotonic() - self._since
        if seconds > self.limit:
            raise ProcessFailure(
                f"no group has finished for {seconds:.0f} s (rollout.timeout); {running} are running, the oldest "
                f"is {oldest}. {self._advice}"
            )


def wait(future: Future[T], check: Callable[[], None]) -> T:
    """Return the future's result. Calls `check` every second, which raises if the result can no longer arrive."""
    while True:
        try:
            return future.result(timeout=_POLL_SECONDS)
        except FutureTimeout:
            if future.done():  # the call itself raised a TimeoutError
                raise
            check()


def wait_for_all(
    services: Sequence[Named],
    calls: Sequence[Future[T]],
    *,
    doing: str,
    key: str,
    limit: float,
    check: Callable[[], None] = lambda: None,
) -> list[T]:
    """Return the results of one call to each of `services`.

    `limit` is in seconds from now; `key` is the recipe key that sets it. `doing` completes "engine0 did not ...". `check` is called
    every second, and may raise.
    Prints a message about late services every `NOTICE_SECONDS`.
    Raises the first exception of a call at once, because the other services may be waiting for the failed one.
    Raises ProcessFailure with the name of the first service that has not answered within `limit`.
    """
    began, left = time.monotonic(), set(calls)
    deadline, next_notice = began + limit, began + NOTICE_SECONDS
    while left and time.monotonic() < deadline:
        seconds = min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
        done, left = wait_for_futures(left, timeout=seconds, return_when=FIRST_EXCEPTION)
        for call in calls:
            if call in done:
                call.result()
        if left:
            check()
        if left and (now := time.monotonic()) >= next_notice:
            next_notice = now + NOTICE_SECONDS
            late = [service.name for service, call in zip(services, calls, strict=True) if call in left]
            logger.warning(_WAITING, now - began, f"{late[0]}{_others(len(late) - 1)}", doing, key, limit, late[0])
    for service, call in zip(services, calls, strict=True):
        if not call.done():
            raise ProcessFailure(
                f"{service.name} did not {doing} within {key} = {limit:g} s. Its log is in the run's "
                f"logs/{service.name}.log; raise {key} if it is only slow."
            )
    return [call.result() for call in calls]


def _others(count: int) -> str:
    return f" and {pluralize(count, 'other')}" if count else ""


def when_done(call: Future[T], then: Callable[[Future[T]], None], result: Future[Any]) -> None:
    """Run `then` once `call` is done, in the transport's thread. Errors of `then` and of `call` become the exception of
    `result`."""

    def done(call: Future[T]) -> None:
        try:
            then(call)
        except BaseException as error:  # noqa: BLE001 -- `result` raises it
            result.set_exception(error)

    call.add_done_callback(done)


def gather(calls: Sequence[Future[T]]) -> Future[list[T]]:
    """Return a future with the results of all calls, or the first exception."""
    result: Future[list[T]] = Future()
    if not calls:
        result.set_result([])
    lock, left = threading.Lock(), [len(calls)]

    def done(call: Future[T]) -> None:
        error = call.exception()
        with lock:
            left[0] -= 1
            is_last = not left[0] and not result.done()
            is_first_error = error is not None and not result.done()
            if is_first_error:
                result.set_exception(error)
        if is_last and error is None:
            result.set_result([each.result() for each in calls])

    for call in calls:
        call.add_done_callback(done)
    return result


def attach(result: tuple[Group, DataRef]) -> Group:
    """Set each sample's reference to its token vectors and return the group."""
    group, data = result
    for sample in group.samples:
        sample.data = data
    return group
