"""Stand-ins of engines that die, and the fleet that restarts them."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import Any

from megarl.cluster.failures import CallFailed, Failure, ProcessInfo, Raised, ServiceDied
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.source_engines import EnginesSource
from megarl.types import Prompt
from tests.rollout.test_source import ManualService, Prompts, refreshing


class Service(ManualService):
    """An engine's process that can die: its calls then fail."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name, self.address = f"engine{number}", f"10.0.0.{number}"
        self.known_place = ProcessInfo(f"service {self.name}", "host", 7)
        self.dead: Failure | None = None
        self.stopping = False
        self.started: Future[Any] = Future()
        self.rendezvous: Future[Any] = Future()
        self.end: Future[None] = Future()  # of `watch`
        self.step: int | None = None  # that runs

    def failure(self) -> Failure | None:
        return self.dead

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method in ("start", "watch"):
            return self.started if method == "start" else self.end
        if method == "open_rendezvous":
            return self.rendezvous
        if method == "running_step":
            answer: Future[Any] = Future()
            answer.set_result(self.step)
            return answer
        return super().call(method, *arguments)

    def die(self) -> None:
        """End the process."""
        self.dead = Failure.death(self.known_place, "killed")
        self.fail_calls(ServiceDied(self.dead))

    def stop(self) -> None:
        """End the process on purpose."""
        self.stopping = True
        self.dead = Failure.death(self.known_place, "it was stopped")
        self.fail_calls(ServiceDied(self.dead))

    def break_down(self) -> None:
        """The engine fails in a process that lives, as after an error of a device."""
        error = CallFailed(Failure.raised(self.known_place, Raised("EngineDead", "engine died: out of memory", "")))
        self.fail_calls(error)
        self.end.set_exception(error)

    def fail_calls(self, error: BaseException) -> None:
        running, self.running = self.running, {}
        for call in running.values():
            call.set_exception(error)


class Engines:
    """A fleet of services, and the processes that it has started."""

    def __init__(
        self, count: int = 2, least: int = 1, load_limit: float = math.inf, step_limit: float = 0.0, group_size: int = 1
    ) -> None:
        self.services = [Service(number) for number in range(count)]
        self.handles = [EngineHandle(each) for each in self.services]  # type: ignore[arg-type]
        self.notices: list[str] = []
        self.events: list[str | None] = []  # of the notices
        self.restarts: list[int] = []
        self.ended: list[int] = []  # engines that have left and lost their process
        descriptions = [{"receivers": number} for number in range(count)]
        limits = (load_limit, step_limit)
        functions = (self.restart, self.note, self.end)
        self.fleet = Fleet(self.handles, descriptions, least, *functions, *limits, together=0.0, group_size=group_size)

    def note(self, text: str, event: str | None) -> None:
        self.notices.append(text)
        self.events.append(event)

    def restart(self, engine: int) -> None:
        """End the old process: its calls fail in a thread of the transport, for which a cluster waits. Then start a new one."""
        self.restarts.append(engine)
        ended = ServiceDied(
            Failure.death(ProcessInfo(f"service engine{engine}", "host", 7), "it was ended, to start again")
        )
        thread = threading.Thread(target=self.services[engine].fail_calls, args=(ended,), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "the calls of an ended process wait for a lock that the controller holds"
        self.services[engine] = Service(engine)
        self.handles[engine].service = self.services[engine]  # type: ignore[assignment]

    def end(self, engine: int) -> None:
        """End a process: its calls fail in a thread of the transport, as in a real one."""
        self.ended.append(engine)
        service = self.services[engine]
        service.stopping = True
        service.dead = Failure.death(ProcessInfo(f"service {service.name}", "host", 7), "it was stopped")
        thread = threading.Thread(target=service.fail_calls, args=(ServiceDied(service.dead),), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "the calls of an ended process wait for a lock that the controller holds"

    def load(self, engine: int) -> None:
        """Let the new process of an engine finish its start."""
        self.services[engine].started.set_result({"receivers": "new"})
        self.fleet.poll()

    def update(self) -> None:
        with self.fleet.update():
            self.fleet.updated(self.fleet.members())


def source_of(engines: Engines) -> EnginesSource:
    """Return a source of samples from the fleet's engines."""
    recipe = refreshing(ManualService()).recipe
    prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
    fleet = engines.fleet
    return EnginesSource(recipe, prompts, engines.handles, [0], fleet.poll, fleet=fleet)  # type: ignore[arg-type]
