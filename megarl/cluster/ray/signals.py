"""Signals beside Ray: an exception that a handler raises must arrive as itself, and the handler must stay ours."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ray


def ray_get(*args: Any, **options: Any) -> Any:
    """`ray.get`, out of which a signal handler's exception comes as it was raised."""
    with _interruptions_as_they_are():
        return ray.get(*args, **options)


def ray_wait(*args: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """`ray.wait`, out of which a signal handler's exception comes as it was raised."""
    with _interruptions_as_they_are():
        return ray.wait(*args, **options)


@contextlib.contextmanager
def _interruptions_as_they_are() -> Iterator[None]:
    """Within Ray's compiled code an exception of a handler may end as a SystemError that "a result was returned with an
    exception set", and the exception itself only as its cause."""
    try:
        yield
    except SystemError as error:
        cause = error.__cause__ or error.__context__
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None
        raise


@contextlib.contextmanager
def termination_stays_ours() -> Iterator[None]:
    """While Ray starts: it would put handlers of SIGTERM in place, one of its compiled part and one of Python's, which end
    the process at once, with another status, and leave processes behind. It has no option for that."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    install, ours = signal.signal, signal.getsignal(signal.SIGTERM)

    def all_but_termination(number: int, handler: Any) -> Any:
        return install(number, ours if number == signal.SIGTERM else handler)

    signal.signal = all_but_termination  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = install
        signal.signal(signal.SIGTERM, ours)  # over that of the compiled part
