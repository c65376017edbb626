"""The thread that owns an engine: it steps while requests run and takes commands between steps.

Inference libraries are not thread-safe, and a step must not meet an update half-way. So one thread
does everything, and other threads leave it commands. What goes wrong there is fatal: it reaches
every waiting caller, and the engine then says that it is dead and why.

The threads of a group's engines (group.py) agree before each step: all step or none does, and what all are to do
together is begun once every one of them has been told to.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from megarl.engines.base import EngineDead, EngineRefused, GenerationAborted, OnFinished, Seat
from megarl.engines.group import Group
from megarl.types import Completion, GenerationRequest

T = TypeVar("T")
Command = tuple[Callable[[], Any], Future]

_IDLE_SECONDS = 0.005  # until an idle engine of a group asks the others again whether they have something to step


class Backend(Protocol):
    """What an inference library must do; called by the owning thread alone."""

    def join(self, group: Group) -> None:
        """Before `start`, of an engine of a group: its steps and updates are also the others'."""
        ...

    def start(self) -> dict[str, Any]: ...

    def admit(self, key: str, request: GenerationRequest) -> None:
        """Queue the request. It was checked before: an exception here is fatal."""
        ...

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Advance; returns (key, completions) of the requests whose samples are all finished. In a group, an engine
        without requests takes part in the others' step."""
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
        self._commands: queue.SimpleQueue[tuple[Command, bool]] = queue.SimpleQueue()  # whether all do it together
        self._lock = threading.Lock()  # a command is either queued before the end or refused after it
        self._dead: str | None = "was not started"
        self._failure: BaseException | None = None  # of which it died
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        # the owning thread's
        self._running: dict[str, tuple[_Job, int]] = {}  # key -> its call and group
        self._counter = itertools.count()
        self._paused = False
        self._stop = False
        self._group: Group | None = None
        self._together: deque[Command] = deque()  # that wait until every engine of the group has been told
        self._elsewhere = 0  # requests in flight in the group's other engines, when all last agreed
        self._still = False  # the group has nothing to step
        self._failed: Future | None = None  # of the command that ended the engine, whose caller is told at the end

    def start(self, seat: Seat | None = None) -> dict[str, Any]:
        assert self._thread is None, "an engine is started once"
        self._dead = None
        self._thread = threading.Thread(target=self._run, name=f"megarl-{self._name}", daemon=True)
        self._thread.start()
        return self.call(lambda: self._begin(seat))

    def call(self, command: Callable[[], T], *, together: bool = False) -> T:
        """Run `command` in the owning thread between two steps; returns or raises what it does.

        EngineRefused leaves the engine alive, any other exception ends it. `together`: in a group, it runs once every
        engine of the group has been told to do the like, in all of them between the same two steps.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._dead is not None:
                raise EngineDead(f"engine {self._name!r} {self._dead}")
            self._commands.put(((command, future), together))
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
        if self._thread is None:
            return
        with contextlib.suppress(EngineDead):  # it ended before
            self.call(self._request_stop)
        self._thread.join()  # what it takes down may be the whole process's

    def watch(self) -> None:
        self._ended.wait()
        if self._failure is not None:
            raise EngineDead(f"engine {self._name!r} {self._dead}") from self._failure

    @property
    def running(self) -> int:
        """Requests in flight; exact in the owning thread. In a group: in all of its engines, and exact where they all do
        the same."""
        return len(self._running) + self._elsewhere

    def _begin(self, seat: Seat | None) -> dict[str, Any]:
        if seat is not None:
            self._group = Group(seat, self._name)
            self._backend.join(self._group)
        return self._backend.start()

    def _run(self) -> None:
        cause, failure = "was shut down", None
        try:
            while not self._stop:
                self._serve_commands()
                if not self._stop and self._group is not None and not self._agree_to_step(self._group):
                    continue
                if not self._stop:
                    self._report(self._backend.step())
        except BaseException as error:  # noqa: BLE001 - handed to every caller
            cause, failure = f"died: {type(error).__name__}: {error}", error
        finally:
            self._end(cause, failure)

    def _serve_commands(self) -> None:
        """Run what is queued; returns at the end, or once nothing is queued and there is something to step. In a group:
        or there may be, which the others know."""
        while not self._stop:
            idle = self._still if self._group is not None else self._paused or not self._running
            try:
                command, together = self._commands.get(idle, None if self._group is None else _IDLE_SECONDS)
            except queue.Empty:
                return
            self._still = False
            if together and self._group is not None:
                self._together.append(command)
            else:
                self._serve(command)

    def _serve(self, command: Command) -> None:
        run, future = command
        try:
            result = run()
        except EngineRefused as refusal:
            future.set_exception(refusal)
        except BaseException:
            self._failed = future
            raise
        else:
            future.set_result(result)

    def _agree_to_step(self, group: Group) -> bool:
        """Whether all engines of the group step now. Does what all have been told to do together; notes the end."""
        own = len(self._running)
        agreed = group.agree(running=own, paused=self._paused, ready=bool(self._together))
        self._elsewhere = agreed.running - own
        if agreed.leaving:
            self._stop, self._group = True, None  # all know it: none is to be told
        elif agreed.ready == group.seat.size:
            self._serve(self._together.popleft())
        else:
            self._still = not agreed.running or bool(agreed.paused)
            return not self._still
        return False

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
        own = cause
        if self._group is not None:
            cause = self._leave(self._group, cause, failure)
        with self._lock:
            self._dead, self._failure = cause, failure
        dead = EngineDead(f"engine {self._name!r} {cause}")
        dead.__cause__ = failure
        if self._failed is not None and failure is not None:
            self._failed.set_exception(failure if cause == own else dead)  # the latter: another engine failed first
        while True:
            try:
                (_, future), _ = self._commands.get_nowait()
            except queue.Empty:
                break
            future.set_exception(dead)
        for _, future in self._together:
            future.set_exception(dead)
        for job in {job for job, _ in self._running.values()}:
            job.events.put(dead)
        self._running.clear()
        self._ended.set()
        self._backend.shutdown()

    @staticmethod
    def _leave(group: Group, cause: str, failure: BaseException | None) -> str:
        if failure is not None:
            return group.fail(cause)
        group.leave()
        return cause
