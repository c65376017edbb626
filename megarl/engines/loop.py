"""The thread that owns an engine: it steps while requests run and takes commands between steps.

Inference libraries are not thread-safe, and a step must not meet an update half-way. So one thread
does everything, and other threads leave it commands. What goes wrong there is fatal: it reaches
every waiting caller, and the engine then says that it is dead and why.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from megarl.engines.base import EngineDead, EngineRefused, GenerationAborted, OnFinished
from megarl.types import Completion, GenerationRequest

T = TypeVar("T")


class Backend(Protocol):
    """What an inference library must do; called by the owning thread alone."""

    def start(self) -> dict[str, Any]: ...

    def admit(self, key: str, request: GenerationRequest) -> None:
        """Queue the request. It was checked before: an exception here is fatal."""
        ...

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Advance; returns (key, completions) of the requests whose samples are all finished."""
        ...

    def cancel(self, keys: list[str]) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(eq=False)
class _Job:
    """One `generate` call. The owning thread puts finished groups, or an exception that ends the call."""

    events: queue.SimpleQueue[tuple[int, list[Completion]] | BaseException] = field(default_factory=queue.SimpleQueue)


class EngineLoop:
    """Runs a backend in a thread of its own. See `RolloutEngine` for what the methods promise."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # a command is either queued before the end or refused after it
        self._dead: str | None = "was not started"
        self._thread: threading.Thread | None = None
        # the owning thread's
        self._running: dict[str, tuple[_Job, int]] = {}  # key -> its call and group
        self._counter = itertools.count()
        self._paused = False
        self._stop = False

    def start(self) -> dict[str, Any]:
        assert self._thread is None, "an engine is started once"
        self._dead = None
        self._thread = threading.Thread(target=self._run, name=f"megarl-{self._name}", daemon=True)
        self._thread.start()
        return self.call(self._backend.start)

    def call(self, command: Callable[[], T]) -> T:
        """Run `command` in the owning thread between two steps; returns or raises what it does.

        EngineRefused leaves the engine alive, any other exception ends it.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._dead is not None:
                raise EngineDead(f"engine {self._name!r} {self._dead}")
            self._commands.put((command, future))
        return future.result()

    def generate(self, requests: Sequence[GenerationRequest], on_finished: OnFinished) -> None:
        job = _Job()
        self.call(lambda: self._admit(requests, job))
        try:
            for _ in requests:
                event = job.events.get()
                if isinstance(event, BaseException):
                    raise event
                on_finished(*event)
        except (EngineDead, GenerationAborted):
            raise
        except BaseException:  # the caller's own: its other requests have no one to go to
            self.call(lambda: self._cancel(lambda owner: owner is job))
            raise

    def pause(self) -> None:
        self.call(lambda: self._set_paused(True))

    def resume(self) -> None:
        self.call(lambda: self._set_paused(False))

    def abort(self) -> None:
        self.call(lambda: self._cancel(lambda owner: True))

    def shutdown(self) -> None:
        if self._thread is None or self._dead is not None:
            return
        self.call(self._request_stop)
        self._thread.join()

    @property
    def running(self) -> int:
        """Requests in flight; exact in the owning thread."""
        return len(self._running)

    def _run(self) -> None:
        cause, failure = "was shut down", None
        try:
            while not self._stop:
                self._serve_commands()
                if not self._stop:
                    self._report(self._backend.step())
        except BaseException as error:  # noqa: BLE001 - handed to every caller
            cause, failure = f"died: {type(error).__name__}: {error}", error
        finally:
            self._end(cause, failure)

    def _serve_commands(self) -> None:
        """Run what is queued; returns at the end, or once nothing is queued and there is something to step."""
        while not self._stop:
            idle = self._paused or not self._running
            try:
                command, future = self._commands.get(block=idle)
            except queue.Empty:
                return
            try:
                result = command()
            except EngineRefused as refusal:
                future.set_exception(refusal)
            except BaseException as error:
                future.set_exception(error)
                raise
            else:
                future.set_result(result)

    def _admit(self, requests: Sequence[GenerationRequest], job: _Job) -> None:
        for request in requests:
            key = f"{request.group}-{next(self._counter)}"
            self._backend.admit(key, request)
            self._running[key] = (job, request.group)

    def _report(self, finished: list[tuple[str, list[Completion]]]) -> None:
        for key, completions in finished:
            job, group = self._running.pop(key)
            job.events.put((group, completions))

    def _cancel(self, chosen: Callable[[_Job], bool]) -> None:
        keys = [key for key, (job, _) in self._running.items() if chosen(job)]
        self._backend.cancel(keys)
        for job in {self._running.pop(key)[0] for key in keys}:
            job.events.put(GenerationAborted(f"engine {self._name!r} aborted its requests"))

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _request_stop(self) -> None:
        self._stop = True

    def _end(self, cause: str, failure: BaseException | None) -> None:
        with self._lock:
            self._dead = cause
        dead = EngineDead(f"engine {self._name!r} {cause}")
        dead.__cause__ = failure
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                break
            future.set_exception(dead)
        for job in {job for job, _ in self._running.values()}:
            job.events.put(dead)
        self._running.clear()
        self._backend.shutdown()
