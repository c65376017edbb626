"""Stand-ins of engines that join and leave, the fleet that changes their number, and the source of their samples."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from megarl.cluster.failures import CallFailed, Failure, ProcessInfo, Raised, SamplesLost
from megarl.rollout.engine_handle import EngineHandle, SamplingEngine
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.source_engines import EnginesSource
from megarl.types import Group, Prompt
from tests.rollout.test_source import ManualService, Prompts, refreshing
from tests.support.dying_engines import Engines, Service


class LeavingService(Service):
    """Hands over the groups that are not in `scoring`. `silent`: its replies wait for `reply`."""

    host, device_names, address = "node7", "4", "10.0.0.7"

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scoring: set[int] = set()
        self.silent = False
        self.waiting: list[tuple[Future[Any], list[int]]] = []
        self.hand_overs = 0

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method != "hand_over":
            return super().call(method, *arguments)
        self.hand_overs += 1
        done: Future[Any] = Future()
        self.waiting.append((done, arguments[0]))
        if not self.silent:
            self.reply()
        return done

    def reply(self) -> None:
        waiting, self.waiting = self.waiting, []
        for done, groups in waiting:
            numbers = [number for number in groups if number in self.running and number not in self.scoring]
            place = ProcessInfo(f"service {self.name}", "host", 7)
            for number in numbers:
                refused = Raised("EngineRefused", f"group {number} was handed over", "")
                self.running.pop(number).set_exception(CallFailed(Failure.raised(place, refused)))
            done.set_result({number: self.partials.get(number, ()) for number in numbers})

    def fail_calls(self, error: BaseException) -> None:
        waiting, self.waiting = self.waiting, []
        for done, _ in waiting:
            done.set_exception(error)
        super().fail_calls(error)


class LostData:
    """A reference to vectors that were stored on a lost machine."""

    is_lost = True

    def get(self) -> list[Any]:
        raise SamplesLost("they were stored on a machine that is lost")


class ElasticEngines(Engines):
    """A fleet that gains and loses engines, and a source that samples with it."""

    def __init__(self, count: int = 2, least: int = 1, **rollout: Any) -> None:
        super().__init__(count, least)
        self.services = [LeavingService(number) for number in range(count)]
        for handle, service in zip(self.handles, self.services, strict=True):
            handle.service = service  # type: ignore[assignment]
        descriptions = [{"receivers": number} for number in range(count)]
        self.fleet = Fleet(self.handles, descriptions, least, self.restart, self.note, self.end, together=0.0)
        self.sampling: list[SamplingEngine] = [*self.fleet.engines]
        recipe = refreshing(ManualService(), **rollout).recipe
        prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
        check = self.fleet.poll
        self.source = EnginesSource(recipe, prompts, self.sampling, [0], check, fleet=self.fleet)  # type: ignore[arg-type]

    def restart(self, engine: int) -> None:
        if engine < len(self.services):
            super().restart(engine)
            self.services[engine] = LeavingService(engine)
            self.fleet.engines[engine].service = self.services[engine]  # type: ignore[assignment]
            return
        self.restarts.append(engine)
        self.services.append(LeavingService(engine))
        handle = EngineHandle(self.services[engine])  # type: ignore[arg-type]
        self.handles.append(handle)
        self.fleet.engines.append(handle)
        self.sampling.append(handle)

    def check(self) -> None:
        """Poll the fleet, as a check of the processes does about every second."""
        self.fleet.poll()
        self.source.moves.release_engines()
        self.source.moves.resample_lost()
        self.fleet.poll()

    def finished(self) -> list[int]:
        """Groups with samples that wait for training, in order."""
        return sorted(group.number for group in self._finished())

    def lose(self, *numbers: int) -> None:
        """Lose the samples of finished groups."""
        for group in self._finished():
            for sample in group.samples if group.number in numbers else ():
                sample.data = LostData()

    def _finished(self) -> list[Group]:
        admission = self.source.admission
        items = [item for part in (*admission.closed, admission.tried, admission.waiting()) for item in part]
        return [item.group for item in items if item.accepted]

    def load_all(self) -> None:
        """Let all new processes finish their start."""
        for engine in self.fleet.states.starting:
            if not self.services[engine].started.done():
                self.services[engine].started.set_result({"receivers": "new"})
        self.fleet.poll()

    def step(self, version: int) -> list[int]:
        """Take a batch, update the engines to `version` and admit groups; return the groups of the batch."""
        batch = self.source.take(4)
        self.source.drain()
        self.update()
        self.source.admit(version)
        return [group.number for group in batch.groups]

    def running(self) -> list[list[int]]:
        """Groups that run on each engine."""
        return [sorted(service.running) for service in self.services]

    def all_running(self) -> list[int]:
        return sorted(group for service in self.services for group in service.running)
