"""An object that answers calls from one asyncio loop: the far side of a `Service`."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any

from megarl.cluster.base import load_class
from megarl.cluster.failures import Raised, Returned, run
from megarl.cluster.torchrun.wire import Wire

CONSTRUCTED = 0  # number of the answer that says how the constructor ended; calls count from 1


@dataclass(frozen=True)
class Start:
    """The first message: what to construct."""

    class_path: str
    args: tuple[Any, ...]
    name: str
    log: str


@dataclass(frozen=True)
class Call:
    """A call; its answer is ``(number, Returned | Raised)``."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Stop:
    """The last message."""


async def answer(target: Any, method: str, args: tuple[Any, ...]) -> Returned | Raised:
    """Run a plain or async method of `target`."""
    try:
        value = getattr(target, method)(*args)
        return Returned(await value if inspect.isawaitable(value) else value)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- it is told to the controller
        return Raised.of(error)


async def close(target: Any) -> None:
    """Call the object's ``shutdown()`` where it has one."""
    if hasattr(target, "shutdown"):
        outcome = await answer(target, "shutdown", ())
        if isinstance(outcome, Raised):
            print(outcome.traceback, file=sys.stderr)


class _Server:
    """Answers calls on the running loop. A thread reads the socket, so that callers never wait to write."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._target: Any = None
        self._running: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    async def serve(self, start: Start) -> None:
        # The thread reads from now on: it is also how a controller's death is seen while the object loads.
        threading.Thread(target=self._read, daemon=True).start()
        outcome = run(lambda: load_class(start.class_path)(*start.args))
        if isinstance(outcome, Raised):
            print(outcome.traceback, file=sys.stderr)
            self._send(CONSTRUCTED, outcome)
            return
        self._target = outcome.value
        self._send(CONSTRUCTED, Returned(None))
        await self._stopped.wait()
        await close(self._target)

    def _read(self) -> None:
        while True:
            try:
                message = self._wire.receive()
            except EOFError:  # the controller is gone
                os.killpg(0, signal.SIGKILL)
            if isinstance(message, Stop):
                self._loop.call_soon_threadsafe(self._stopped.set)
            else:
                self._loop.call_soon_threadsafe(self._begin, message)

    def _begin(self, call: Call) -> None:
        task = self._loop.create_task(self._answer(call))
        self._running.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._running.discard)

    async def _answer(self, call: Call) -> None:
        self._send(call.number, await answer(self._target, call.method, call.args))

    def _send(self, number: int, outcome: Returned | Raised) -> None:
        try:
            self._wire.send((number, outcome))
        except OSError:
            raise  # the controller is gone: the reading thread ends this process
        except Exception as error:  # noqa: BLE001 -- what was returned does not pickle
            self._wire.send((number, Raised.of(error)))


async def serve(wire: Wire, start: Start) -> None:
    """Construct what `start` names and answer the calls that come over `wire`, until it says to stop."""
    await _Server(wire).serve(start)
