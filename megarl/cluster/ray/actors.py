"""Ray actor classes that host trainers and engines."""

from __future__ import annotations

import asyncio
import os
import pickle
from typing import Any

from megarl.cluster.base import load_class
from megarl.cluster.failures import ProcessInfo, Raised, Returned, run
from megarl.cluster.key_value_store import release_port, reserve_port
from megarl.cluster.orphan_reaper import OrphanReaper
from megarl.cluster.process import redirect_output
from megarl.cluster.service import answer, close
from megarl.cluster.stacks.channel import serve_stacks


class ConstructorFailed(Raised):
    """Exception of a service's constructor: the reply to every call."""


class TrainerActor:
    """Hosts a trainer and serves one call at a time, in the main thread of its process."""

    def __init__(self, name: str, log: str) -> None:
        redirect_output(log, name)
        serve_stacks()
        self._place = ProcessInfo(name, pid=os.getpid(), log=log)
        self._worker: Any = None

    def where(self, host: str) -> Returned:
        """Return the place of this process, and a port of its machine for rank 0's store. host: address of the machine."""
        self._port = reserve_port(host)
        return Returned((self._place, self._port))

    def ping(self) -> Returned:
        """Reply, to show that the process is alive."""
        return Returned(None)

    def construct(self, class_path: str, args: tuple[Any, ...], env: dict[str, str]) -> Returned | Raised:
        os.environ.update(env)
        if env["RANK"] != "0":
            release_port(self._port)
        outcome = run(lambda: load_class(class_path)(*args))
        if isinstance(outcome, Raised):
            return _log_traceback(outcome)
        self._worker = outcome.value
        return Returned(hasattr(self._worker, "shutdown"))

    def call(self, method: str, args: tuple[Any, ...]) -> Returned | Raised:
        return _log_traceback(run(lambda: getattr(self._worker, method)(*args)))

    def call_packed(self, method: str, data: bytes) -> Returned | Raised:
        """Run `call` with the arguments in `data`, which the controller has pickled (`PackedArguments`)."""
        return self.call(method, pickle.loads(data))  # noqa: S301 -- from the controller, over Ray

    def call_with_data(self, method: str, args: tuple[Any, ...], parts: int) -> tuple[Any, ...]:
        """Run `call` on a method that returns ``(control, data)``; return control and the `parts` entries of data apart."""
        outcome = self.call(method, args)
        if isinstance(outcome, Raised):
            return outcome, *[None] * parts
        control, data = outcome.value
        assert len(data) == parts, f"{method} returned {len(data)} parts instead of {parts}"
        return Returned(control), *data


def _log_traceback(outcome: Returned | Raised) -> Returned | Raised:
    """Print the traceback of an exception to this process's log and return `outcome`."""
    if isinstance(outcome, Raised):
        print(outcome.traceback)
    return outcome


class ServiceActor:
    """Hosts an engine or another service and serves many calls at once, on the actor's asyncio loop."""

    def __init__(self) -> None:
        self._target: Any = None
        self._constructor_error: ConstructorFailed | None = None
        self._reaper: OrphanReaper | None = None
        self._located = asyncio.Event()  # `where` has replied: Ray may begin calls of an async actor in any order
        self._ready = asyncio.Event()  # the constructor has returned or raised

    async def where(self, name: str, log: str) -> ProcessInfo:
        """Return the place of this process, before the constructor starts, which may take long."""
        self._located.set()
        return ProcessInfo(name, pid=os.getpid(), log=log)

    async def construct(self, class_path: str, args: tuple[Any, ...], name: str, log: str) -> None:
        await self._located.wait()
        outcome = run(self._construct, class_path, args, name, log)
        if isinstance(outcome, Raised):
            self._constructor_error = ConstructorFailed(outcome.type, outcome.message, outcome.traceback)
            print(outcome.traceback)
        self._ready.set()

    def _construct(self, class_path: str, args: tuple[Any, ...], name: str, log: str) -> None:
        redirect_output(log, name)
        serve_stacks()
        # The engine's workers must end with it on every machine; the controller's reaper covers only one.
        self._reaper = OrphanReaper()
        os.environ.update(self._reaper.env)
        self._target = load_class(class_path)(*args)

    async def constructed(self) -> Returned | Raised:
        await self._ready.wait()
        return self._constructor_error or Returned(None)

    async def lifetime(self) -> None:
        """Never return: the call ends when this process ends."""
        await asyncio.Event().wait()

    async def call(self, method: str, args: tuple[Any, ...]) -> Returned | Raised:
        await self._ready.wait()
        return self._constructor_error or await answer(self._target, method, args)

    async def call_with_data(self, method: str, args: tuple[Any, ...]) -> tuple[Returned | Raised, Any]:
        outcome = await self.call(method, args)
        if isinstance(outcome, Raised):
            return outcome, None
        control, samples = outcome.value
        return Returned(control), samples

    async def stop(self) -> None:
        await self._ready.wait()
        if self._constructor_error is None:
            await close(self._target)
        if self._reaper is not None:
            self._reaper.close()
