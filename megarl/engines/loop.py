"""The thread that owns an engine: steps while requests run, commands between them. An engine that fails ends all requests.

Inference libraries are not thread-safe, and a step must not overlap an update. So a single thread does everything, and
other threads queue commands for it. An exception in this thread is fatal: every waiting caller receives it, and the
engine is dead from then on.

The threads of a group's engines (group.py) synchronize before each step: either all engines step or none. A collective
command runs once every engine of the group has received it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megarl.engines.backend import Backend
from megarl.engines.base import EngineDead, EngineRefused, GenerationAborted, GroupRank, OnFinished
from megarl.engines.group import EngineGroup
from megarl.engines.partials import check_versions
from megarl.engines.running import RunningRequests
from megarl.engines.tape import StepTape, TapeSpec, copy_event, hand_over_event, requests_event
from megarl.types import Completion, GenerationRequest

T = TypeVar("T")

_IDLE_SECONDS = 0.005  # interval at which an idle engine of a group synchronizes with the others
_REPLAY_SECONDS = 60.0  # interval at which a waiting replay checks for requests that the recorded run had not


@dataclass(eq=False)
class _Command:
    """A call for the owning thread. collective: in a group, it waits for the other engines. event: its name on the tape."""

    run: Callable[[], Any]
    future: Future
    collective: bool = False
    event: str | None = None


@dataclass(eq=False)
class _Job:
    """One `generate` call. The owning thread puts finished groups into `events`, None for a group that has been handed
    over, or the exception that ends the call."""

    events: queue.SimpleQueue[tuple[int, list[Completion]] | BaseException | None] = field(
        default_factory=queue.SimpleQueue
    )


class EngineLoop:
    """Runs a backend in its thread. Every method is thread-safe, and raises EngineDead after the engine failed."""

    def __init__(self, backend: Backend, name: str, tape: TapeSpec | None = None) -> None:
        self._backend = backend
        self._name = name
        self._tape: StepTape[_Command] = StepTape.of(tape)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()  # a command is either queued before the end or rejected after it
        self._dead: str | None = "was not started"
        self._failure: BaseException | None = None  # the cause of its death
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.running_step: int | None = None  # number of the step that runs, from 1; None between steps
        # state of the owning thread
        self._steps = 0
        self._running: RunningRequests[_Job] = RunningRequests()
        self._copies: dict[
            str, list[GenerationRequest]
        ] = {}  # of a replay, by event: copies that no caller has received
        self._paused = False
        self._stop = False
        self._group: EngineGroup | None = None
        self._collective: deque[_Command] = deque()  # wait until every engine of the group has received them
        self._running_elsewhere = 0  # running requests in the group's other engines, at the last synchronization
        self._idle = False  # the group has no step to run
        self._awaited: str | None = None  # printed last: the event for which a replay waits
        self._fatal: Future | None = None  # of the command that ended the engine, completed at the very end

    def start(self, group_rank: GroupRank | None = None) -> dict[str, Any]:
        """Load the model; blocks. `group_rank`: rank of the engine in its group, which loads together; None without a group.

        Returns plain values: `engine`, `version` (of the engine's software), `device`, `can_sleep`,
        `can_update_in_flight`, `merged_because` (the reason why it needs merged weights; None: it takes the adapters of its
        spec) and `receivers` ([name, host id] pairs for weight sync). RuntimeError if the engine starts with dummy weights
        and its software cannot update weights.
        """
        assert self._thread is None, "an engine is started once"
        self._dead = None
        self._thread = threading.Thread(target=self._run, name=f"megarl-{self._name}", daemon=True)
        self._thread.start()
        return self.call(lambda: self._begin(group_rank))

    def call(self, command: Callable[[], T], *, collective: bool = False, event: str | None = None) -> T:
        """Run `command` in the owning thread between two steps; returns or raises its result.

        EngineRefused leaves the engine alive, any other exception ends it. `collective`: in a group, the command waits
        until every engine has received one, and all run them between the same two steps. `event`: its name on the tape; a
        replay waits for its step.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._dead is not None:
                raise EngineDead(f"engine {self._name!r} {self._dead}")
            self._commands.put(_Command(command, future, collective, event))
        return future.result()

    def generate(self, requests: Sequence[GenerationRequest], on_finished: OnFinished) -> None:
        job = _Job()
        self.call(lambda: self._admit(requests, job), event=requests_event(requests) if requests else None)
        try:
            for _ in requests:
                event = job.events.get()
                if isinstance(event, BaseException):
                    raise event
                if event is not None:
                    on_finished(*event)
        except (EngineDead, GenerationAborted):
            raise
        except BaseException:  # raised by `on_finished`: nothing can receive the remaining completions
            self.call(lambda: self._cancel(lambda owner: owner is job))
            raise

    def pause(self) -> None:
        """Return once no step is running; no step starts until `resume`, in the whole group. Requests are still admitted."""
        self.call(lambda: self._set_paused(True), event="pause")

    def resume(self) -> None:
        self.call(lambda: self._set_paused(False), event="resume")

    def abort(self) -> None:
        """End every running request; their `generate` calls raise GenerationAborted."""
        self.call(lambda: self._cancel(lambda owner: True))

    def hand_over(self, groups: Collection[int] | None = None) -> list[GenerationRequest]:
        """End the running requests of `groups` (None: of all) and return them with their samples so far: `partials` is
        set if an engine can continue them. Their `generate` calls return without these groups. Groups that do not run are skipped.
        """
        return self.call(lambda: self._hand_over(groups), event=hand_over_event(groups))

    def copy_running(self, number: int) -> list[GenerationRequest]:
        """Return all running requests as `hand_over` does, and let them run. `number` names the copy on the tape; a replay
        returns the requests of the recorded step. EngineRefused if the engine's software does not return the tokens of
        running requests."""
        event = copy_event(number)
        return self.call(lambda: self._copies.pop(event) if event in self._copies else self._copy(), event=event)

    def shutdown(self) -> None:
        """End the engine with its processes, and the other engines of its group. May be called twice."""
        if self._thread is None:
            return
        with contextlib.suppress(EngineDead):  # already ended
            self.call(self._request_stop)
        self._thread.join()  # it may destroy process-wide state

    def watch(self) -> None:
        """Block until the engine is shut down. Raises EngineDead as soon as it fails, even without a pending call."""
        self._ended.wait()
        if self._failure is not None:
            raise EngineDead(f"engine {self._name!r} {self._dead}") from self._failure

    @property
    def running(self) -> int:
        """Number of running requests of the engine, or of its whole group. Exact in the owning thread; for a group, in a
        collective command."""
        return len(self._running) + self._running_elsewhere

    def _begin(self, group_rank: GroupRank | None) -> dict[str, Any]:
        if group_rank is not None:
            self._group = EngineGroup(group_rank, self._name)
            self._backend.join(self._group)
        return self._backend.start()

    def _run(self) -> None:
        cause, failure = "was shut down", None
        try:
            while not self._stop:
                self._serve_commands()
                if not self._stop and self._group is not None and not self._sync_group(self._group):
                    continue
                if not self._stop:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - raised in every caller
            cause, failure = f"died: {type(error).__name__}: {error}", error
        finally:
            self._end(cause, failure)

    def _step(self) -> None:
        self._steps += 1
        self.running_step = self._steps
        self._report(self._backend.step())
        self.running_step = None
        self._tape.stepped()

    def _serve_commands(self) -> None:
        """Run queued commands until the queue is empty; blocks while the engine is idle.

        An idle engine of a group only blocks for a moment, since another engine may have received requests.
        """
        while not self._stop:
            command = self._next_command()
            if command is None:
                return
            self._idle = False
            if command.collective and self._group is not None:
                self._collective.append(command)
            else:
                self._serve(command)

    def _next_command(self) -> _Command | None:
        """Return the next command to run, or None if the engine may step. A replay holds commands until their steps."""
        while True:
            self._take_due_copies()
            held = self._tape.next_held()
            if held is not None:
                return held
            running = bool(self._running)
            if not running:
                self._tape.check_idle()
            waits = self._tape.waits
            idle = self._idle if self._group is not None else self._paused or not running or waits
            seconds = _IDLE_SECONDS if self._group is not None else _REPLAY_SECONDS if waits else None
            if self._commands.empty():  # the engine steps or waits now
                self._tape.flush()
            try:
                command = self._commands.get(idle, seconds)
            except queue.Empty:
                if not waits:
                    return None
                self._tape.check_unrecorded()
                self._print_awaited()
                continue
            if command.event is None or self._tape.may_enter(command.event):
                return command
            self._tape.hold(command.event, command)

    def _take_due_copies(self) -> None:
        """Copy the running requests where a replay's tape has a copy."""
        while (event := self._tape.next_copy()) is not None:
            self._copies[event] = self._copy()
            self._tape.entered(event)
            for command in self._tape.take_held(event):
                self._serve(command)

    def _copy(self) -> list[GenerationRequest]:
        return self._running.copy(self._backend.partials)

    def _print_awaited(self) -> None:
        """Print once for which event a replay waits: in a replay that differs, it never arrives."""
        awaited = self._tape.awaited()
        if awaited != self._awaited:
            self._awaited = awaited
            print(f"engine {self._name!r}: {awaited}", flush=True)

    def _serve(self, command: _Command) -> None:
        try:
            result = command.run()
            if command.event is not None:
                self._tape.entered(command.event)
        except EngineRefused as refusal:
            command.future.set_exception(refusal)
        except BaseException:
            self._fatal = command.future
            raise
        else:
            command.future.set_result(result)

    def _sync_group(self, group: EngineGroup) -> bool:
        """Return True if all engines of the group step now. Otherwise run the next collective command, stop, or idle."""
        running = len(self._running)
        state = group.sync_state(running=running, paused=self._paused, ready=bool(self._collective))
        self._running_elsewhere = state.running - running
        if state.leaving:
            self._stop, self._group = True, None  # every engine of the group has seen it
        elif state.ready == group.size:
            self._serve(self._collective.popleft())
        else:
            self._idle = not state.running or bool(state.paused)
            return not self._idle
        return False

    def _admit(self, requests: Sequence[GenerationRequest], job: _Job) -> None:
        check_versions(requests, self._running.spans.version, self._name)
        for request in requests:
            for key, part in self._running.add(job, request):
                self._backend.admit(key, part)
        self._report_finished()

    def _report(self, finished: list[tuple[str, list[Completion]]]) -> None:
        for key, completions in finished:
            self._running.finish(key, completions)
        self._report_finished()

    def _report_finished(self) -> None:
        for job, group, completions in self._running.take_finished():
            job.events.put((group, completions))

    def _hand_over(self, groups: Collection[int] | None) -> list[GenerationRequest]:
        chosen = self._running.of_groups(groups)
        partials = self._backend.hand_over(self._running.keys_of(chosen))
        requests = self._running.copy(partials.__getitem__, chosen)
        for job in self._running.remove(chosen):
            job.events.put(None)
        return requests

    def _cancel(self, is_chosen: Callable[[_Job], bool]) -> None:
        chosen = self._running.of_jobs(is_chosen)
        self._backend.cancel(self._running.keys_of(chosen))
        for job in set(self._running.remove(chosen)):
            job.events.put(GenerationAborted(f"engine {self._name!r} aborted its requests"))

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _request_stop(self) -> None:
        self._stop = True

    def _end(self, cause: str, failure: BaseException | None) -> None:
        local_cause = cause
        if self._group is not None:
            cause = self._leave(self._group, cause, failure)
        with self._lock:
            self._dead, self._failure = cause, failure
        dead = EngineDead(f"engine {self._name!r} {cause}")
        dead.__cause__ = failure
        if self._fatal is not None and failure is not None:
            self._fatal.set_exception(failure if cause == local_cause else dead)  # dead: another engine failed first
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            command.future.set_exception(dead)
        for command in [*self._collective, *self._tape.all_held()]:
            command.future.set_exception(dead)
        for job in set(self._running.remove(self._running.of_groups(None))):
            job.events.put(dead)
        self._ended.set()
        try:
            self._backend.shutdown()
        finally:
            self._tape.close()  # last: it may fail, for example on a full disk

    @staticmethod
    def _leave(group: EngineGroup, cause: str, failure: BaseException | None) -> str:
        if failure is not None:
            return group.fail(cause)
        group.leave()
        return cause
