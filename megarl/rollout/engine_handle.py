"""Typed handles on engine processes: one method for each call that the controller makes.

A handle passes the server's method itself, not its name: mypy compares the arguments with the server's signature, and
"jump to definition" leads from the controller's line to the code that runs in the process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeGuard, TypeVar

from megarl.cluster.base import Service
from megarl.cluster.calls import when_done
from megarl.cluster.failures import ClusterError, ServiceDied
from megarl.cluster.outages import Outage
from megarl.engines.base import EngineDead, GroupRank
from megarl.platform.load import MachineLoad
from megarl.rollout.collect.collector import GroupCollector
from megarl.rollout.judge.server import Judgement, JudgeServer
from megarl.rollout.server import RolloutServer
from megarl.rollout.teacher.server import TeacherServer
from megarl.types import DataRef, GenerationRequest, Group, Partial, Prompt
from megarl.weight_sync.session import Session, UpdateReport

P = ParamSpec("P")
R = TypeVar("R")


class SamplingEngine(Protocol):
    """An engine that samples and scores groups."""

    @property
    def name(self) -> str: ...

    def submit(self, requests: list[GenerationRequest]) -> Future[None]:
        """Start sampling `requests`; the result comes when all are sampled."""

    def collect(self, group: int) -> Future[tuple[Group, DataRef]]:
        """Wait for a submitted group; the result is the scored group and the location of its vectors."""

    def load_weights(self) -> Future[int]:
        """Load the weights that the engine received last, and wait in host memory; the result is their version."""

    def hand_over(self, groups: list[int]) -> Future[dict[int, tuple[Partial, ...]]]:
        """End the sampling of `groups`; their `collect` then fails. The result has the samples so far of each, for
        `GenerationRequest.partials`; groups that the engine does not sample, or no longer, are missing."""

    def copy_partials(self, number: int) -> Future[dict[int, tuple[Partial, ...]]]:
        """Return the samples so far of each group that the engine samples. `number`: of the copy, for the engine's tape."""


class ServiceHandle:
    """A process around one server object. `service` carries the calls."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def name(self) -> str:
        return self.service.name

    def _call(
        self, method: Callable[Concatenate[Any, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Start a call of `method`."""
        assert not kwargs, "calls to processes have positional arguments only"
        return self.service.call(method.__name__, *args)

    def _call_with_data(
        self, method: Callable[Concatenate[Any, P], Awaitable[tuple[R, Any]]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[tuple[R, DataRef]]:
        """Start a call of `method`. Its second result stays in the process: see `Service.call_with_data`."""
        assert not kwargs, "calls to processes have positional arguments only"
        return self.service.call_with_data(method.__name__, *args)

    def _call_with_parts(
        self, method: Callable[[Any, int], Awaitable[tuple[R, Any]]], parts: int
    ) -> Future[tuple[R, list[DataRef]]]:
        """Start a call of `method` with `parts`. The lists of vectors in its second result stay in the process: see
        `Service.call_with_parts`."""
        return self.service.call_with_parts(method.__name__, parts)


class EngineHandle(ServiceHandle):
    """An engine of the policy (`RolloutServer`): it samples, scores and receives weights. It has the only handle that collects."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._collector: GroupCollector | None = None  # of the present process
        self._collector_lock = threading.Lock()

    def open_rendezvous(self) -> Future[GroupRank]:
        """Open the rendezvous of the engine's group on its machine."""
        return self._call(RolloutServer.open_rendezvous, self.service.address)

    def start(self, group_rank: GroupRank | None = None) -> Future[dict[str, Any]]:
        """Load the engine; the result is its description. `group_rank`: its rank in its group, if any."""
        if group_rank is None:
            return self._call(RolloutServer.start)
        return self._call(RolloutServer.start, group_rank)

    def submit(self, requests: list[GenerationRequest]) -> Future[None]:
        return self._call(RolloutServer.submit, requests)

    def collect(self, group: int) -> Future[tuple[Group, DataRef]]:
        with self._collector_lock:
            if self._collector is None or self._collector.service is not self.service:
                process = EngineHandle(self.service)  # this handle may get another one
                self._collector = GroupCollector(
                    self.service, lambda most: process._call_with_parts(RolloutServer.collect, most)
                )
            collector = self._collector
        return collector.collect(group)

    def hand_over(self, groups: list[int]) -> Future[dict[int, tuple[Partial, ...]]]:
        return self._call(RolloutServer.hand_over, groups)

    def copy_partials(self, number: int) -> Future[dict[int, tuple[Partial, ...]]]:
        return self._call(RolloutServer.copy_partials, number)

    def collect_responses(self, group: int) -> Future[tuple[None, DataRef]]:
        """Return the location of the responses' texts of a collected group, for the judge."""
        return self._call_with_data(RolloutServer.collect_responses, group)

    def connect_weight_sync(self, session: Session) -> Future[str | None]:
        """Join a weight sync session; the result is the reason if the engine cannot."""
        return self._call(RolloutServer.connect_weight_sync, session)

    def update_weights(self, version: int) -> Future[UpdateReport]:
        """Receive the weights of `version`; the result is the engine's report."""
        return self._call(RolloutServer.update_weights, version)

    def load_weights(self) -> Future[int]:
        """Load the weights that the engine received last, and wait in host memory; the result is their version."""
        return self._call(RolloutServer.load_weights)

    def watch(self) -> Future[None]:
        """Return a future that ends when the engine has ended, and raises if it has failed."""
        return self._call(RolloutServer.watch)

    def running_step(self) -> Future[int | None]:
        """Return the number of the step that runs, from 1; None between steps."""
        return self._call(RolloutServer.running_step)

    def outages(self, seen: int) -> Future[tuple[int, list[Outage]]]:
        """Return the number of changes so far and the services that are down; the result comes when this number is not `seen`."""
        return self._call(RolloutServer.outages, seen)

    def machine_load(self) -> Future[MachineLoad]:
        """Return the load of the engine's machine since the last call."""
        return self._call(RolloutServer.machine_load)

    def sleep(self) -> Future[None]:
        """Free the device memory."""
        return self._call(RolloutServer.sleep)

    def wake(self, tag: str) -> Future[None]:
        """Allocate device memory again. `tag`: "weights" or "kv_cache"."""
        return self._call(RolloutServer.wake, [tag])

    def pause(self) -> Future[None]:
        """Stop sampling; running requests wait for `resume`."""
        return self._call(RolloutServer.pause)

    def resume(self) -> Future[None]:
        return self._call(RolloutServer.resume)

    def stop(self) -> None:
        """End the process."""
        self.service.stop()

    def start_profile(self, name: str) -> Future[None]:
        return self._call(RolloutServer.start_profile, name)

    def stop_profile(self) -> Future[None]:
        return self._call(RolloutServer.stop_profile)


class TeacherHandle(ServiceHandle):
    """An engine of the teacher (`TeacherServer`): it computes log-probs of sampled tokens."""

    def start(self) -> Future[dict[str, Any]]:
        return self._call(TeacherServer.start)

    def score(self, groups: list[Group]) -> Future[None]:
        """Compute the teacher's log-probs of every token of `groups`."""
        return self._call(TeacherServer.score, groups)

    def collect(self, group: int) -> Future[tuple[None, DataRef]]:
        """Return the location of a scored group's vectors."""
        return self._call_with_data(TeacherServer.collect, group)


class JudgeHandle(ServiceHandle):
    """An engine of the judge (`JudgeServer`): it scores responses."""

    def start(self) -> Future[dict[str, Any]]:
        return self._call(JudgeServer.start)

    def judge(self, group: int, prompt: Prompt, responses: DataRef) -> Future[tuple[list[Judgement], DataRef]]:
        """Score the `responses` of a group; the result is a judgement per sample and the location of the verdicts' texts."""
        return self._call_with_data(JudgeServer.judge, group, prompt, responses)


def failed_in(error: BaseException, service: str) -> TypeGuard[ClusterError]:
    """Return whether a call failed in the process of the service with this name."""
    return isinstance(error, ClusterError) and error.failure.place.name == f"service {service}"


def is_death(error: ClusterError) -> bool:
    """Return whether the engine of a failed call has ended: its process, or the engine in it (`EngineDead`)."""
    return isinstance(error, ServiceDied) or error.failure.cause.startswith(f"{EngineDead.__name__}:")


def with_engine_check(engines: Sequence[EngineHandle], check: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `check` and then raises the error of a failed engine, even if no call to it is pending.

    An engine of a group takes part in every step of the group, so it can fail while it has no request.
    """
    ends = [engine.watch() for engine in engines]

    def check_all() -> None:
        check()
        for end in ends:
            if end.done():
                end.result()

    return check_all


def load_group(engines: Sequence[EngineHandle]) -> list[Future[dict[str, Any]]]:
    """Start loading the engines of one group (`rollout.data_parallel`); the results are their descriptions.

    The members start once the first engine has opened the group's rendezvous. One that is alone starts at once.
    """
    if len(engines) == 1:
        return [engines[0].start()]
    processes = [EngineHandle(engine.service) for engine in engines]  # the handles may get others
    loads: list[Future[dict[str, Any]]] = [Future() for _ in engines]

    def start(rank: int, opened: Future[GroupRank]) -> None:
        started = processes[rank].start(replace(opened.result(), rank=rank, size=len(engines)))
        when_done(started, lambda done: loads[rank].set_result(done.result()), loads[rank])

    opened = processes[0].open_rendezvous()
    for rank, load in enumerate(loads):
        when_done(opened, functools.partial(start, rank), load)
    return loads
