"""Server side of a `Service` (an engine's process): one object that serves calls on one asyncio loop."""

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
from megarl.cluster.wire import UnreadableMessage, Wire

CONSTRUCTED = 0  # number of the constructor's outcome; calls are numbered from 1


@dataclass(frozen=True)
class ServiceStart:
    """First message: the class to construct and its arguments."""

    class_path: str
    args: tuple[Any, ...]
    name: str
    log: str


@dataclass(frozen=True)
class ServiceCall:
    """Message for one call; the reply is ``(number, Returned | Raised)``."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class ServiceStop:
    """Last message: shut down and end."""


async def answer(target: Any, method: str, args: tuple[Any, ...]) -> Returned | Raised:
    """Run a plain or async method of `target` and return its value or exception."""
    try:
        value = getattr(target, method)(*args)
        return Returned(await value if inspect.isawaitable(value) else value)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- the controller reports it
        return Raised.of(error)


async def close(target: Any) -> None:
    """Call the object's ``shutdown()`` if it has one."""
    if hasattr(target, "shutdown"):
        outcome = await answer(target, "shutdown", ())
        if isinstance(outcome, Raised):
            print(outcome.traceback, file=sys.stderr)


class ServiceServer:
    """Serves calls on the running loop. A thread reads the socket, so that callers never block on a write."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._target: Any = None
        self._running: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    async def serve(self, start: ServiceStart) -> None:
        """Construct the object of `start` and serve the calls that arrive until `ServiceStop`."""
        self._loop = asyncio.get_running_loop()
        # Start the reader before the constructor: it also notices the controller's death while the object loads.
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
            except EOFError:  # the controller has ended
                os.killpg(0, signal.SIGKILL)
            except UnreadableMessage as error:  # which call it is, is unknown: the controller fails all of them
                try:
                    self._send(CONSTRUCTED, Raised.of(error))
                finally:
                    os.killpg(0, signal.SIGKILL)
            if isinstance(message, ServiceStop):
                self._loop.call_soon_threadsafe(self._stopped.set)
            else:
                self._loop.call_soon_threadsafe(self._begin, message)

    def _begin(self, call: ServiceCall) -> None:
        task = self._loop.create_task(self._answer(call))
        self._running.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self._running.discard)

    async def _answer(self, call: ServiceCall) -> None:
        self._send(call.number, await answer(self._target, call.method, call.args))

    def _send(self, number: int, outcome: Returned | Raised) -> None:
        try:
            self._wire.send((number, outcome))
        except OSError:
            raise  # the controller has ended: the reader thread ends this process
        except Exception as error:  # noqa: BLE001 -- the result does not pickle
            self._wire.send((number, Raised.of(error)))
