"""Jobs for process pools, built by `find`: used by tests/subprocess_pool/test_pool.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from megarl.subprocess_pool.job import CallError, Job


def find(name: str, settings: dict[str, Any]) -> Job:
    prepared: list[int] = []

    def told(request: Any) -> Any:
        """Return the function's settings and the id of the process that prepared it."""
        return {"name": name, "settings": settings, "request": request, "prepared": prepared, "own": os.getpid()}

    functions = {"told": told, "refuses": refuses, "size": len, "sleeps": time.sleep, "unreadable": unreadable}
    functions |= {"prints": print, "lock": lock, "big": big, "fills": fills, "awaits": awaits}
    return Job(functions[name], lambda: prepared.append(os.getpid()))


def refuses(request: str) -> None:
    raise CallError(f"no {request} here")


def lock(request: object) -> object:
    """Return a result that pickle refuses."""
    return threading.Lock()


class Unreadable:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("nothing",)


def unreadable(request: object) -> Unreadable:
    return Unreadable()


def big(request: int) -> bytes:
    return bytes(request)


def fills(megabytes: int) -> int:
    """Allocate `megabytes` as numpy does: reserve, then write. Returns the size."""
    return int(np.ones(megabytes << 20, dtype=np.uint8).sum()) >> 20


in_flight = 0


async def awaits(request: dict[str, Any]) -> dict[str, Any]:
    """Wait and then act as the request describes. Returns the largest number of concurrent jobs in its process."""
    global in_flight
    in_flight += 1
    most = in_flight
    try:
        for _ in range(4):
            await asyncio.sleep(request.get("seconds", 0.2) / 4)
            most = max(most, in_flight)
        await _act(request.get("what", ""))
    finally:
        in_flight -= 1
    return {"most": most, "own": os.getpid()}


async def _act(action: str) -> None:
    if action == "block":
        time.sleep(1000)
    elif action == "print":
        print("scored")
    elif action == "compute":
        _count(10**12)
    elif action == "child blocks":
        await asyncio.create_task(_block())
    elif action == "cancelled":
        raise asyncio.CancelledError
    elif action == "leave":
        sys.exit(4)
    elif action == "child leaves":
        await asyncio.gather(_leave(), asyncio.sleep(1000))
    elif action == "exit":
        os._exit(3)
    elif action == "stubborn":  # it ignores cancellation
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)


async def _block() -> None:
    await asyncio.sleep(0.01)
    time.sleep(1000)


async def _leave() -> None:
    sys.exit(4)


def _count(numbers: int) -> int:
    """Count in C, where no other thread of the process runs."""
    return sum(range(numbers))
