"""What a forked process does: it answers requests, one after the other (`serve`) or many together (`serve_concurrently`)."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
import time
import types
from collections.abc import Coroutine, Generator
from typing import Any

from megarl.cluster.torchrun.wire import Wire
from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.job import CallError, Job
from megarl.subprocess_pool.progress_mark import NOTHING, ProgressMark

Task = tuple[int, str, bytes, float]
"""A number, the name of the work, the request, pickled, and the seconds that the call may run."""

Message = tuple[int, str, Any, float]
"""The task's number and "started"; "answered" and what its function returned, pickled; "error" and the cause; or
"timeout". With the seconds it took."""


def serve(wire: Wire, works: dict[str, Job]) -> None:
    """Answer each list of tasks with a `Message` a task, in their order. Whoever kills processes looks after the time."""
    loop = asyncio.new_event_loop()  # kept, so that a function may keep a connection open from call to call
    wire.send("ready")
    while True:
        try:
            tasks: list[Task] = wire.receive()
        except EOFError:
            return
        for number, name, request, _ in tasks:
            began = time.monotonic()
            word, content = _call(works[name], request, loop)
            wire.send((number, word, content, time.monotonic() - began))


def _call(work: Job, request: bytes, loop: asyncio.AbstractEventLoop) -> tuple[str, Any]:
    try:
        value = work.function(_unpickled(request))
        if inspect.isawaitable(value):
            value = loop.run_until_complete(value)
        return "answered", _pickled(value)
    except BaseException as error:  # noqa: BLE001 -- sys.exit() and the like: one call's failure
        return "error", _cause_of(error)


def serve_concurrently(channel: NonblockingChannel, works: dict[str, Job], mark: ProgressMark) -> None:
    """Answer tasks of async functions, all that have come at a time, each when it is done. A call is cancelled at its
    time's end."""
    _ConcurrentServer(channel, works, mark).run()


_number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=NOTHING)


class _ConcurrentServer:
    def __init__(self, channel: NonblockingChannel, works: dict[str, Job], mark: ProgressMark) -> None:
        self.channel, self.works, self.mark = channel, works, mark
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._make_task)
        self.under_way: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    def run(self) -> None:
        self.loop.add_reader(self.channel.connection, self._hear)
        self._say("ready")
        self.loop.run_forever()

    def _hear(self) -> None:
        for data in self.channel.receive():
            try:
                tasks: list[Task] = _unpickled(data)
            except Exception:
                self.loop.stop()  # what was in it would never begin, and nobody would know
                raise
            for task in tasks:
                under_way = self.loop.create_task(self._answer(*task))
                self.under_way.add(under_way)
                under_way.add_done_callback(self.under_way.discard)
        if self.channel.ended:
            self.loop.stop()

    def _say(self, message: Message | str) -> None:
        self.channel.send(message)
        if self.channel.waiting:
            self.loop.add_writer(self.channel.connection, self._flush)

    def _flush(self) -> None:
        self.channel.flush()
        if not self.channel.waiting:
            self.loop.remove_writer(self.channel.connection)

    async def _answer(self, number: int, name: str, request: bytes, limit: float) -> None:
        self._say((number, "started", None, 0.0))
        began = time.monotonic()
        _number.set(number)
        call = self.loop.create_task(self._call(self.works[name], request))
        done, _ = await asyncio.wait({call}, timeout=limit)
        seconds = time.monotonic() - began
        if done:
            word, content = call.result()
            self._say((number, word, content, seconds))
            return
        call.cancel()
        await asyncio.wait({call})  # one that goes on regardless is never reported, and its process is killed
        self._say((number, "timeout", None, seconds))

    async def _call(self, work: Job, request: bytes) -> tuple[str, Any]:
        try:
            return "answered", _pickled(await work.function(_unpickled(request)))
        except BaseException as error:  # noqa: BLE001 -- as in the other way; and that it was cancelled, which is known
            return "error", _cause_of(error)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """What a call starts is marked as the call's, too: it inherits its context."""
        number = _number.get()
        made = coroutine if number == NOTHING else _marked(coroutine, number, self.mark)
        return asyncio.Task(made, loop=loop, **options)


async def _marked(coroutine: Coroutine[Any, Any, Any], number: int, mark: ProgressMark) -> Any:
    return await _steps(coroutine, number, mark)


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], number: int, mark: ProgressMark) -> Generator[Any, Any, Any]:
    """Run a coroutine, and say so while it runs, but not while it waits."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            with mark.at(number):
                step = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        except (SystemExit, KeyboardInterrupt) as leaving:  # it would end the loop, and all other calls with it
            raise CallError(_cause_of(leaving)) from leaving
        try:
            value, error = (yield step), None
        except BaseException as thrown:  # noqa: BLE001 -- the coroutine's, to whom it is handed on
            value, error = None, thrown


def _unpickled(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 -- from this user's own process, see Wire


def _pickled(value: Any) -> bytes:
    """Raises CallError for what pickle cannot take."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise CallError(f"its answer cannot be pickled: {type(error).__name__}: {error}") from error


def _cause_of(error: BaseException) -> str:
    return error.cause if isinstance(error, CallError) else f"it raised {type(error).__name__}: {error}"
