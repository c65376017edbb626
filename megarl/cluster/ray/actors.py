"""The actors around trainers and engines: what runs on the far side of Ray."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from megarl.cluster.base import load_class
from megarl.cluster.failures import Place, Raised, Returned, run
from megarl.cluster.orphan_reaper import Guard
from megarl.cluster.process import free_port, redirect_output
from megarl.cluster.service import answer, close


class Unborn(Raised):
    """What the constructor of a service's object raised: the answer to every call."""


class TrainerActor:
    """Answers one call at a time, in the process's main thread."""

    def __init__(self, who: str, log: str) -> None:
        redirect_output(log, who)
        self._place = Place(who, pid=os.getpid(), log=log)
        self._worker: Any = None

    def where(self) -> Returned:
        """This process, and a free port on its machine."""
        return Returned((self._place, free_port()))

    def ping(self) -> Returned:
        """Says that the process lives."""
        return Returned(None)

    def construct(self, class_path: str, args: tuple[Any, ...], env: dict[str, str]) -> Returned | Raised:
        os.environ.update(env)
        outcome = run(lambda: load_class(class_path)(*args))
        if isinstance(outcome, Raised):
            return self._told(outcome)
        self._worker = outcome.value
        return Returned(hasattr(self._worker, "shutdown"))

    def call(self, method: str, args: tuple[Any, ...]) -> Returned | Raised:
        return self._told(run(lambda: getattr(self._worker, method)(*args)))

    def call_with_data(self, method: str, args: tuple[Any, ...], parts: int) -> tuple[Any, ...]:
        """What `call` returns, less the `parts` lists of vectors that the method returns beside it; and these."""
        outcome = self.call(method, args)
        if isinstance(outcome, Raised):
            return outcome, *[None] * parts
        control, data = outcome.value
        assert len(data) == parts, f"{method} returned {len(data)} parts, {parts} were asked for"
        return Returned(control), *data

    def _told(self, outcome: Returned | Raised) -> Returned | Raised:
        if isinstance(outcome, Raised):
            print(outcome.traceback)  # in this process's log too
        return outcome


class ServiceActor:
    """Answers many calls at once, on the actor's asyncio loop."""

    def __init__(self) -> None:
        self._target: Any = None
        self._unborn: Unborn | None = None
        self._guard: Guard | None = None
        self._told = asyncio.Event()  # Ray may begin calls of an async actor in any order
        self._born = asyncio.Event()

    async def where(self, who: str, log: str) -> Place:
        """This process; answered before its object is constructed, which may take long."""
        self._told.set()
        return Place(who, pid=os.getpid(), log=log)

    async def construct(self, class_path: str, args: tuple[Any, ...], who: str, log: str) -> None:
        await self._told.wait()
        outcome = run(self._construct, class_path, args, who, log)
        if isinstance(outcome, Raised):
            self._unborn = Unborn(outcome.type, outcome.message, outcome.traceback)
            print(outcome.traceback)
        self._born.set()

    def _construct(self, class_path: str, args: tuple[Any, ...], who: str, log: str) -> None:
        redirect_output(log, who)
        # An engine's own workers end with it, also where this machine is not the controller's.
        self._guard = Guard()
        os.environ.update(self._guard.env)
        self._target = load_class(class_path)(*args)

    async def constructed(self) -> Returned | Raised:
        await self._born.wait()
        return self._unborn or Returned(None)

    async def lifetime(self) -> None:
        """Never returns: its end is this process's end."""
        await asyncio.Event().wait()

    async def call(self, method: str, args: tuple[Any, ...]) -> Returned | Raised:
        await self._born.wait()
        return self._unborn or await answer(self._target, method, args)

    async def call_with_data(self, method: str, args: tuple[Any, ...]) -> tuple[Returned | Raised, Any]:
        outcome = await self.call(method, args)
        if isinstance(outcome, Raised):
            return outcome, None
        control, samples = outcome.value
        return Returned(control), samples

    async def stop(self) -> None:
        await self._born.wait()
        if self._unborn is None:
            await close(self._target)
        if self._guard is not None:
            self._guard.close()
