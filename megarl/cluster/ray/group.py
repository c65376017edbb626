"""Trainers as Ray actors. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

from megarl.cluster.failures import (
    ClusterError,
    Failure,
    ProcessInfo,
    Raised,
    Returned,
    WorkerFailed,
    collect,
    host_name,
    worker_failed,
)
from megarl.cluster.ray.devices import is_alive
from megarl.cluster.ray.failures import LEFT_BEFORE_START, death_cause, not_started
from megarl.cluster.ray.service import START_SECONDS, RayData
from megarl.cluster.ray.signals import ray_get, ray_wait
from megarl.cluster.ray.watch import RayWatch, read_stacks_on_nodes
from megarl.cluster.stacks.report import GroupStacks
from megarl.cluster.stacks.stall import StallWatch
from megarl.types import DataRef

if TYPE_CHECKING:
    from megarl.cluster.ray.cluster import RayCluster

PING_SECONDS = 0.1  # time for an idle trainer to reply to a ping; a later check waits for the rest


class RayGroup:
    """See `megarl.cluster.base.WorkerGroup`."""

    def __init__(
        self,
        cluster: RayCluster,
        name: str,
        actors: list[Any],
        places: list[ProcessInfo],
        nodes: list[str],
        *,
        essential: bool = True,
        kept: bool = False,
    ) -> None:
        """kept: the processes have served an earlier controller, which has died."""
        self.kept = kept
        self._cluster, self._name, self._actors, self._places, self.nodes = cluster, name, actors, places, nodes
        self.essential = essential
        self.failure: WorkerFailed | None = None  # see `megarl.cluster.base.WorkerGroup`
        self._call, self._call_began = "", 0.0  # the call that runs, for messages; "" if none does
        self.has_shutdown = False
        self._pings: list[Any] = []  # of the check in progress; empty once all ranks have replied

    @property
    def size(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._wait_watched([actor.call.remote(method, args) for actor in self._actors], method)

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        times, copies = Counter(id(args) for args in per_rank), dict[int, Any]()
        for args in per_rank:  # those of several ranks are serialised once; Ray passes their value to each
            if times[id(args)] > 1 and id(args) not in copies:
                copies[id(args)] = ray.put(args)
        calls = [
            actor.call.remote(method, copies.get(id(args), args))
            for actor, args in zip(self._actors, per_rank, strict=True)
        ]
        return self._wait_watched(calls, method)

    def scatter_with_data(
        self, method: str, per_rank: Sequence[tuple[Any, ...] | None], parts: int
    ) -> list[tuple[Any, list[DataRef]] | None]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        calls = [
            None if args is None else actor.call_with_data.options(num_returns=1 + parts).remote(method, args, parts)
            for actor, args in zip(self._actors, per_rank, strict=True)
        ]
        controls = self._wait_watched([refs and refs[0] for refs in calls], method)
        return [
            None if refs is None else (control, [RayData(ref) for ref in refs[1:]])
            for control, refs in zip(controls, calls, strict=True)
        ]

    def shutdown(self) -> None:
        if self.has_shutdown and self.failure is None:  # other ranks would wait for a dead one
            self.has_shutdown = False
            self.call("shutdown")
        self.kill()

    def kill(self) -> list[Any]:
        """Kill the processes. Returns references that are ready once Ray has noticed their end."""
        for actor in self._actors:
            ray.kill(actor)
        ends = [actor.ping.remote() for actor in self._actors]
        self._actors, self._pings = [], []
        return ends

    def local_pids(self) -> list[int]:
        """Process ids of the ranks on this machine."""
        return [place.pid for place in self._places if place.host == host_name()]

    def construct(self, class_path: str, args: tuple[Any, ...], env: list[dict[str, str]], settings: str) -> None:
        calls = [
            actor.construct.remote(class_path, args, rank_env, settings)
            for actor, rank_env in zip(self._actors, env, strict=True)
        ]
        self.has_shutdown = all(self._wait_watched(calls, "its start"))

    def check(self) -> None:
        """Raise WorkerFailed if an idle rank has died; keep it as `failure` if the group is not essential."""
        if not self._actors or self.failure is not None:
            return
        if not self._pings:
            self._pings = [actor.ping.remote() for actor in self._actors]
        answers = self._poll(self._pings, set(range(self.size)), PING_SECONDS)
        failures = [answer for _, answer in answers if isinstance(answer, Failure)]
        if failures and self.essential:
            raise worker_failed(failures)
        if failures:
            self.failure = worker_failed(failures)
        if len(answers) == self.size:
            self._pings = []

    def wait_for_start(self, refs: list[Any]) -> list[Any]:
        """Run `wait` on the first call of each rank. Raises WorkerFailed if Ray does not start a process in time."""
        deadline = time.monotonic() + START_SECONDS

        def check() -> None:
            self._cluster.check_services()
            for place, node in zip(self._places, self.nodes, strict=True):
                if not is_alive(node):
                    raise WorkerFailed(Failure.death(place, LEFT_BEFORE_START))
            if time.monotonic() > deadline:
                _, late = ray_wait(refs, num_returns=len(refs), timeout=0)
                ranks = [rank for rank, ref in enumerate(refs) if ref in late]
                note = f"\n{len(ranks)} of {len(refs)} processes were not started." if len(ranks) > 1 else ""
                raise WorkerFailed(not_started(self._places[ranks[0] if ranks else 0], START_SECONDS), note)

        return self.wait(refs, check)

    def _wait_watched(self, refs: list[Any], doing: str) -> list[Any]:
        """Run `wait` with the watches of stopped processes and of progress. `doing`: the call's name, for messages."""
        watch, stall = RayWatch(self._places, self.nodes, doing), StallWatch(self.stacks, self._cluster.stall)

        def check() -> None:
            self._cluster.check_services()
            watch.check()
            stall.check()

        self._call, self._call_began = doing, time.monotonic()
        try:
            return self.wait(refs, check)
        finally:
            self._call = ""

    def stacks(self, full: bool) -> GroupStacks:
        """Read the states of the ranks. Callable from any thread."""
        call, seconds = self._call, time.monotonic() - self._call_began
        states = read_stacks_on_nodes([place.pid for place in self._places], self.nodes, full)
        return GroupStacks(self._name, self._places, states, call, seconds)

    def wait(self, refs: list[Any], check: Callable[[], None] | None = None) -> list[Any]:
        """Wait for `refs`, one per rank, and return their values. A rank with None is not waited for."""
        check = check or self._cluster.check_services
        called = [rank for rank, ref in enumerate(refs) if ref is not None]
        try:
            return collect(len(refs), lambda pending, seconds: self._poll(refs, pending, seconds), check, called)
        except ClusterError as error:
            if self.essential or not isinstance(error, WorkerFailed):
                self._cluster.shutdown()
            raise

    def _poll(self, refs: list[Any], pending: set[int], seconds: float) -> list[tuple[int, Returned | Failure]]:
        rank_of = {refs[rank]: rank for rank in pending}
        ready, _ = ray_wait(list(rank_of), num_returns=len(rank_of), timeout=seconds)
        return [(rank_of[ref], self._outcome(self._places[rank_of[ref]], ref)) for ref in ready]

    @staticmethod
    def _outcome(place: ProcessInfo, ref: Any) -> Returned | Failure:
        try:
            outcome = ray_get(ref)
        except RayActorError as error:
            return Failure.death(place, death_cause(error))
        except RayError as error:
            return Failure.raised(place, Raised.of(error))
        return outcome if isinstance(outcome, Returned) else Failure.raised(place, outcome)
