"""Calls to rollout processes, and how they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
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


def wait(future: Future[T], check_processes: Callable[[], None]) -> T:
    """The future's result. `check_processes` is asked every second and raises where a process has died."""
    while True:
        try:
            return future.result(timeout=_POLL_SECONDS)
        except FutureTimeout:
            if future.done():  # the call itself raised a TimeoutError
                raise
            check_processes()


def attach(result: tuple[Group, DataRef]) -> Group:
    """Say in each sample where its vectors lie."""
    group, data = result
    for sample in group.samples:
        sample.data = data
    return group
