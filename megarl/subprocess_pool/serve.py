"""Main loop of a worker process: calls run one after the other (`serve`) or concurrently (`ConcurrentServer`)."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
import time
import types
from collections.abc import Coroutine, Generator
from typing import Any

from megarl.cluster.wire import Wire
from megarl.subprocess_pool.channel import NonblockingChannel
from megarl.subprocess_pool.job import CallError, Job
from megarl.subprocess_pool.progress_mark import IDLE, ProgressMark

Task = tuple[int, str, bytes, float]
"""Call number, job name, pickled request, and time limit in seconds."""

Message = tuple[int, str, Any, float]
"""Call number, kind, content and seconds. Kinds: "started"; "answered" with the pickled return value; "error" with the
cause; "timeout"."""


def serve(wire: Wire, jobs: dict[str, Job]) -> None:
    """Answer each list of tasks with one `Message` per task, in order. The pool enforces time limits."""
    loop = asyncio.new_event_loop()  # one loop for all calls: a function may keep a connection open between calls
    wire.send("ready")
    while True:
        try:
            tasks: list[Task] = wire.receive()
        except EOFError:
            return
        for number, name, request, _ in tasks:
            began = time.monotonic()
            kind, content = _call(jobs[name], request, loop)
            wire.send((number, kind, content, time.monotonic() - began))


def _call(job: Job, request: bytes, loop: asyncio.AbstractEventLoop) -> tuple[str, Any]:
    try:
        value = job.function(_unpickled(request))
        if inspect.isawaitable(value):
            value = loop.run_until_complete(value)
        return "answered", _pickled(value)
    except BaseException as error:  # noqa: BLE001 -- sys.exit() and the like fail this call alone
        return "error", _cause_of(error)


_number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=IDLE)


class ConcurrentServer:
    """Runs all received tasks of async functions concurrently and answers each when it ends. Cancels a call at its limit."""

    def __init__(self, channel: NonblockingChannel, jobs: dict[str, Job], mark: ProgressMark) -> None:
        self.channel, self.jobs, self.mark = channel, jobs, mark
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._make_task)
        self.running: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    def run(self) -> None:
        self.loop.add_reader(self.channel.connection, self._receive)
        self._send("ready")
        self.loop.run_forever()

    def _receive(self) -> None:
        for data in self.channel.receive():
            try:
                tasks: list[Task] = _unpickled(data)
            except Exception:
                self.loop.stop()  # its calls would never start, and the pool would wait for them
                raise
            for task in tasks:
                running = self.loop.create_task(self._answer(*task))
                self.running.add(running)
                running.add_done_callback(self.running.discard)
        if self.channel.ended:
            self.loop.stop()

    def _send(self, message: Message | str) -> None:
        self.channel.send(message)
        if self.channel.has_unsent:
            self.loop.add_writer(self.channel.connection, self._flush)

    def _flush(self) -> None:
        self.channel.flush()
        if not self.channel.has_unsent:
            self.loop.remove_writer(self.channel.connection)

    async def _answer(self, number: int, name: str, request: bytes, limit: float) -> None:
        self._send((number, "started", None, 0.0))
        began = time.monotonic()
        _number.set(number)
        call = self.loop.create_task(self._call(self.jobs[name], request))
        done, _ = await asyncio.wait({call}, timeout=limit)
        seconds = time.monotonic() - began
        if done:
            kind, content = call.result()
            self._send((number, kind, content, seconds))
            return
        call.cancel()
        await asyncio.wait({call})  # a call that ignores cancellation sends nothing, and the pool kills this process
        self._send((number, "timeout", None, seconds))

    async def _call(self, job: Job, request: bytes) -> tuple[str, Any]:
        try:
            return "answered", _pickled(await job.function(_unpickled(request)))
        except BaseException as error:  # noqa: BLE001 -- as in `_call` above; `_answer` handles cancellation
            return "error", _cause_of(error)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Mark the steps of a call's tasks. Tasks that a call creates inherit its context, and so its number."""
        number = _number.get()
        return asyncio.Task(
            coroutine if number == IDLE else _marked(coroutine, number, self.mark), loop=loop, **options
        )


async def _marked(coroutine: Coroutine[Any, Any, Any], number: int, mark: ProgressMark) -> Any:
    return await _marked_steps(coroutine, number, mark)


@types.coroutine
def _marked_steps(coroutine: Coroutine[Any, Any, Any], number: int, mark: ProgressMark) -> Generator[Any, Any, Any]:
    """Run a coroutine, with the mark set while it executes and cleared while it waits."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            with mark.executing(number):
                step = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        except (SystemExit, KeyboardInterrupt) as leaving:  # would end the loop and every other call
            raise CallError(_cause_of(leaving)) from leaving
        try:
            value, error = (yield step), None
        except BaseException as thrown:  # noqa: BLE001 -- passed on to the coroutine
            value, error = None, thrown


def _unpickled(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 -- sent by this user's process, see Wire


def _pickled(value: Any) -> bytes:
    """Pickle a return value. Raises CallError if pickle cannot."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise CallError(f"its answer cannot be pickled: {type(error).__name__}: {error}") from error


def _cause_of(error: BaseException) -> str:
    return error.cause if isinstance(error, CallError) else f"it raised {type(error).__name__}: {error}"
