"""Calls to rollout processes, and how they are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for_futures
from typing import Any, Protocol, TypeVar

from megarl.types import DataRef, Group

T = TypeVar("T")

_POLL_SECONDS = 1.0


class Service(Protocol):
    """What is used of cluster/'s services: calls that answer later."""

    @property
    def name(self) -> str: ...

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def call_with_data(self, method: str, *args: Any) -> Future[tuple[Any, DataRef]]: ...


class Silence:
    """How long no group has finished, held to `rollout.timeout` (`limit`, in seconds)."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.broken()

    def broken(self) -> None:
        """A group has finished, or the first of those that run has started."""
        self._since = time.monotonic()

    def check(self, running: int, oldest: str) -> None:
        """Raise RuntimeError where it has lasted for too long. `oldest` names one of the `running` groups."""
        seconds = time.monotonic() - self._since
        if seconds > self.limit:
            raise RuntimeError(
                f"no group has finished for {seconds:.0f} s (rollout.timeout); {running} are under way, the oldest "
                f"is {oldest}. See the engines' logs in the run's logs/; raise rollout.timeout if they are slow."
            )


def wait(future: Future[T], check: Callable[[], None]) -> T:
    """The future's result. `check` is asked every second, and raises where waiting is in vain."""
    while True:
        try:
            return future.result(timeout=_POLL_SECONDS)
        except FutureTimeout:
            if future.done():  # the call itself raised a TimeoutError
                raise
            check()


def wait_for_all(
    services: Sequence[Service], calls: Sequence[Future[T]], *, doing: str, key: str, limit: float
) -> list[T]:
    """Results of one call to each of `services`, within `limit` seconds of now, which the recipe's `key` says.

    Raises what a call raises as soon as one does: others may wait for that service. Raises RuntimeError that names the
    first that has not answered; `doing`, as in "did not ...", is what it was to do.
    """
    wait_for_futures(calls, timeout=limit, return_when=FIRST_EXCEPTION)
    for call in calls:
        if call.done() and call.exception() is not None:
            call.result()
    for service, call in zip(services, calls, strict=True):
        if not call.done():
            raise RuntimeError(
                f"{service.name} did not {doing} within {key} = {limit:g} s. Its log is in the run's "
                f"logs/{service.name}.log; raise {key} if it is only slow."
            )
    return [call.result() for call in calls]


def watching(services: Sequence[Service], check: Callable[[], None]) -> Callable[[], None]:
    """`check`, which then also raises where an engine of `services` has failed while nobody waited for its answer: one of
    a group steps for the others, too."""
    ends = [service.call("watch") for service in services]

    def both() -> None:
        check()
        for end in ends:
            if end.done():
                end.result()

    return both


def attach(result: tuple[Group, DataRef]) -> Group:
    """Say in each sample where its vectors lie."""
    group, data = result
    for sample in group.samples:
        sample.data = data
    return group
