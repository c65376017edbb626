"""Signals and Ray: preserve exceptions that handlers raise, keep megarl's SIGTERM handler, and keep signals to a group from Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import services


def ray_get(*args: Any, **options: Any) -> Any:
    """Call `ray.get`; an exception of a signal handler leaves it unchanged."""
    with _preserve_interruptions():
        return ray.get(*args, **options)


def ray_wait(*args: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Call `ray.wait`; an exception of a signal handler leaves it unchanged."""
    with _preserve_interruptions():
        return ray.wait(*args, **options)


@contextlib.contextmanager
def _preserve_interruptions() -> Iterator[None]:
    """Raise a handler's exception in place of the SystemError that Ray's compiled code may wrap around it.

    The SystemError reads "returned a result with an exception set" and has the exception as its cause.
    """
    try:
        yield
    except SystemError as error:
        cause = error.__cause__ or error.__context__
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None
        raise


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Keep the present SIGTERM handler while Ray starts.

    Ray installs two handlers, one native and one in Python, without an option to disable them. They end the process at
    once, with another exit status, and leave child processes running.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    install, ours = signal.signal, signal.getsignal(signal.SIGTERM)

    def install_except_sigterm(number: int, handler: Any) -> Any:
        return install(number, ours if number == signal.SIGTERM else handler)

    signal.signal = install_except_sigterm  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = install
        signal.signal(signal.SIGTERM, ours)  # replaces Ray's native handler


@contextlib.contextmanager
def separate_process_groups() -> Iterator[None]:
    """Start Ray's processes, and all processes that they start, in other process groups than this one.

    `timeout`, shells and some cluster managers send SIGTERM to the whole group of a run, which would end Ray before the run has
    saved its checkpoint. Ray has no option for it (`ray/_private/services.py`, ``start_ray_process``).
    """

    class Process(services.ConsolePopen):
        def __init__(self, *args: Any, preexec_fn: Callable[[], None] | None = None, **options: Any) -> None:
            def prepare() -> None:
                os.setpgrp()
                if preexec_fn is not None:
                    preexec_fn()

            super().__init__(*args, preexec_fn=prepare, **options)

    original, services.ConsolePopen = services.ConsolePopen, Process
    try:
        yield
    finally:
        services.ConsolePopen = original
