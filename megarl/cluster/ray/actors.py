"""Ray actor classes that host trainers and engines."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from megarl.cluster.base import load_class
from megarl.cluster.failures import ProcessInfo, Raised, Returned, run
from megarl.cluster.key_value_store import release_port, reserve_port
from megarl.cluster.orphan_reaper import OrphanReaper
from megarl.cluster.process import die_on_quit, redirect_output
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
        self._settings = ""

    def where(self, host: str) -> Returned:
        """Return the place of this process, and a port of its machine for rank 0's store. host: address of the machine."""
        self._port = reserve_port(host)
        return Returned((self._place, self._port))

    def ping(self) -> Returned:
        """Reply, to show that the process is alive."""
        return Returned(None)

    def construct(
        self, class_path: str, args: tuple[Any, ...], env: dict[str, str], settings: str = ""
    ) -> Returned | Raised:
        """Construct the worker. settings: `digest_of` what decides its work, if it may serve another controller."""
        os.environ.update(env)
        if env["RANK"] != "0":
            release_port(self._port)
        outcome = run(lambda: load_class(class_path)(*args))
        if isinstance(outcome, Raised):
            return _log_traceback(outcome)
        self._worker, self._settings = outcome.value, settings
        return Returned(hasattr(self._worker, "shutdown"))

    def release(self) -> tuple[ProcessInfo, str, bool]:
        """Reply to a new controller. Returns the place of this process, the digest of its settings ("": it cannot serve another
        controller), and whether its worker has a ``shutdown``."""
        return self._place, self._settings, hasattr(self._worker, "shutdown")

    def call(self, method: str, args: tuple[Any, ...]) -> Returned | Raised:
        outcome = run(lambda: getattr(self._worker, method)(*args))
        if isinstance(outcome, Raised):
            self._settings = ""  # the call may have left the worker half-way
        return _log_traceback(outcome)

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
        self._settings, self._place = "", ProcessInfo("")
        self._reaper: OrphanReaper | None = None
        self._located = asyncio.Event()  # `where` has replied: Ray may begin calls of an async actor in any order
        self._ready = asyncio.Event()  # the constructor has returned or raised

    async def where(self, name: str, log: str) -> ProcessInfo:
        """Return the place of this process, before the constructor starts, which may take long."""
        self._located.set()
        self._place = ProcessInfo(name, pid=os.getpid(), log=log)
        return self._place

    async def construct(self, class_path: str, args: tuple[Any, ...], name: str, log: str, settings: str = "") -> None:
        """Construct the object. settings: `digest_of` what decides its work, if it may serve another controller."""
        await self._located.wait()
        self._settings = settings
        outcome = run(self._construct, class_path, args, name, log)
        if isinstance(outcome, Raised):
            self._constructor_error = ConstructorFailed(outcome.type, outcome.message, outcome.traceback)
            print(outcome.traceback)
        self._ready.set()

    def _construct(self, class_path: str, args: tuple[Any, ...], name: str, log: str) -> None:
        redirect_output(log, name)
        serve_stacks()
        die_on_quit()
        # The engine's workers must end with it on every machine; the controller's reaper covers only one.
        self._reaper = OrphanReaper()
        os.environ.update(self._reaper.env)
        self._target = load_class(class_path)(*args)

    async def release(self) -> tuple[ProcessInfo, str, bool]:
        """End everything that a controller which has died has requested. Returns the place of this process, the digest of its
        settings ("": it cannot serve another controller), and True."""
        settings = ""
        if self._ready.is_set() and self._constructor_error is None and hasattr(self._target, "release"):
            outcome = await answer(self._target, "release", ())
            settings = self._settings if outcome == Returned(True) else ""
        return self._place, settings, True

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

    async def call_with_parts(self, method: str, parts: int) -> tuple[Any, ...]:
        """Run `call` on a method that returns ``(control, vectors)``. Returns control with the number of lists of vectors, and apart
        each list, up to `parts` of them; None for the others."""
        outcome = await self.call(method, (parts,))
        if isinstance(outcome, Raised):
            return outcome, *[None] * parts
        control, vectors = outcome.value
        return Returned((control, len(vectors))), *vectors, *[None] * (parts - len(vectors))

    async def stop(self) -> None:
        await self._ready.wait()
        if self._constructor_error is None:
            await close(self._target)
        if self._reaper is not None:
            self._reaper.close()
