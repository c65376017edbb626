"""Engines of a teacher or a judge around stand-ins of processes that die, and start again when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from megarl.cluster.failures import CallFailed, Failure, MachineLost, ProcessInfo, Raised, ServiceDied
from megarl.recipe.judge import JudgeConfig, TeacherConfig
from megarl.rollout.engine_handle import JudgeHandle, TeacherHandle
from megarl.rollout.fleet.fixed import FixedModelEngines


class Process:
    """A process of an engine. Its calls end when the test ends them, or it."""

    def __init__(self, name: str) -> None:
        self.name, self.known_place, self.stopping = name, ProcessInfo(f"service {name}", "host", 7), False
        self.calls: list[tuple[str, tuple[Any, ...], Future[Any]]] = []
        self.loading: Future[Any] = Future()
        self.dead: Failure | None = None

    def call(self, method: str, *args: Any) -> Future[Any]:
        if method == "start":
            return self.loading
        answer: Future[Any] = Future()
        self.calls.append((method, args, answer))
        if self.dead is not None:
            answer.set_exception(ServiceDied(self.dead))
        return answer

    call_with_data = call

    def failure(self) -> Failure | None:
        return self.dead

    def die(self, cause: str = "killed") -> None:
        """End the process: its calls fail."""
        self.dead = Failure.death(self.known_place, cause)
        self._fail(ServiceDied(self.dead))
        if not self.loading.done():
            self.loading.set_exception(ServiceDied(self.dead))

    def fail(self, kind: str) -> None:
        """Let the calls fail with an error of this type in a process that lives."""
        self._fail(CallFailed(Failure.raised(self.known_place, Raised(kind, "of the test", ""))))

    def _fail(self, error: Exception) -> None:
        for _, _, answer in self.calls:
            if not answer.done():
                answer.set_exception(error)

    def answer(self, result: Any) -> None:
        """End the oldest call that runs."""
        next(answer for _, _, answer in self.calls if not answer.done()).set_result(result)

    @property
    def running(self) -> int:
        return sum(not answer.done() for _, _, answer in self.calls)


class Fixed:
    """Engines of one role, their processes and the messages to the user."""

    def __init__(
        self, count: int = 2, role: Literal["teacher", "judge"] = "judge", restarts: int = 2, timeout: float = 5.0
    ) -> None:
        settings: Any = (JudgeConfig if role == "judge" else TeacherConfig)(restarts=restarts, timeout=timeout)
        make: Callable[[Any], Any] = JudgeHandle if role == "judge" else TeacherHandle
        self.processes = [Process(f"{role}{number}") for number in range(count)]
        self.handles = [make(process) for process in self.processes]
        self.notices: list[tuple[str, str | None]] = []
        self.restarted: list[str] = []
        self.has_machine = True

        def note(text: str, event: str | None) -> None:
            self.notices.append((text, event))

        self.engines: FixedModelEngines[Any] = FixedModelEngines(
            role, self.handles, settings, self._restart, note, load_limit=50
        )

    def _restart(self, handle: Any) -> None:
        if not self.has_machine:
            raise MachineLost("no machine of the test")
        number = self.handles.index(handle)
        if self.processes[number].dead is None:
            self.processes[number].die("it was ended, to start again")
        self.restarted.append(handle.name)
        self.processes[number] = handle.service = Process(handle.name)

    def load(self, engine: int) -> None:
        self.processes[engine].loading.set_result({})
        self.engines.poll()

    def ask(self, number: int) -> Future[Any]:
        return self.engines.ask(lambda engine: engine.service.call("judge", number))

    def asked(self, engine: int) -> list[int]:
        """Return the numbers that the present process of an engine was asked for."""
        return [args[0] for _, args, _ in self.processes[engine].calls]
