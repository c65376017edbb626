"""Trainers as Ray actors. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import ray

from megarl.cluster.failures import (
    ClusterError,
    Failure,
    ProcessInfo,
    WorkerFailed,
    collect,
    host_name,
    worker_failed,
)
from megarl.cluster.ray import relay
from megarl.cluster.ray.devices import is_alive
from megarl.cluster.ray.failures import LEFT_BEFORE_START, not_started
from megarl.cluster.ray.relay import Calls, DirectCalls, Relays
from megarl.cluster.ray.service import START_SECONDS
from megarl.cluster.ray.signals import ray_wait
from megarl.cluster.ray.start_watch import StartWatch
from megarl.cluster.ray.stored_data import RayData
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
        self._pings: Calls | None = None  # of the check in progress
        self._unanswered: set[int] = set()  # ranks that have not replied to them
        self._relays: Relays | None = None  # of a large group, from the first call on

    @property
    def size(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._wait_watched(self._start(method, [args] * self.size), method)

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        times, copies = Counter(id(args) for args in per_rank), dict[int, Any]()
        for args in per_rank:  # those of several ranks are serialised once; Ray passes their value to each
            if times[id(args)] > 1 and id(args) not in copies:
                copies[id(args)] = ray.put(args)
        return self._wait_watched(self._start(method, [copies.get(id(args), args) for args in per_rank]), method)

    def _start(self, method: str, per_rank: Sequence[Any]) -> Calls:
        """Call ``method`` on each rank with its entry: a tuple of arguments, or a reference to it."""
        if relays := self._all_relays():
            return relays.call(method, per_rank)
        calls = [actor.call.remote(method, args) for actor, args in zip(self._actors, per_rank, strict=True)]
        return DirectCalls(calls, self._places)

    def _all_relays(self) -> Relays | None:
        """Return the relays of a group of more than `relay.DIRECT_RANKS` ranks."""
        if self._relays is None and self.size > relay.DIRECT_RANKS:
            self._relays = Relays(self._name, self._actors, self._places, self.nodes, self._cluster.process_env)
        return self._relays

    def scatter_with_data(
        self, method: str, per_rank: Sequence[tuple[Any, ...] | None], parts: int
    ) -> list[tuple[Any, list[DataRef]] | None]:
        assert len(per_rank) == self.size, f"{len(per_rank)} shards for {self.size} ranks"
        calls = [
            None if args is None else actor.call_with_data.options(num_returns=1 + parts).remote(method, args, parts)
            for actor, args in zip(self._actors, per_rank, strict=True)
        ]
        called = [rank for rank, refs in enumerate(calls) if refs is not None]
        direct = DirectCalls([refs and refs[0] for refs in calls], self._places)
        controls = self._wait_watched(direct, method, called)
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
        if self._relays is not None:
            self._relays.kill()
        ends = [actor.ping.remote() for actor in self._actors]
        self._actors, self._pings, self._relays = [], None, None
        return ends

    def local_pids(self) -> list[int]:
        """Process ids of the ranks on this machine."""
        return [place.pid for place in self._places if place.host == host_name()]

    def construct(self, class_path: str, args: tuple[Any, ...], env: list[dict[str, str]], settings: str) -> None:
        calls = [
            actor.construct.remote(class_path, args, rank_env, settings)
            for actor, rank_env in zip(self._actors, env, strict=True)
        ]
        self.has_shutdown = all(self._wait_watched(DirectCalls(calls, self._places), "its start"))

    def check(self) -> None:
        """Raise WorkerFailed if an idle rank has died; keep it as `failure` if the group is not essential."""
        if not self._actors or self.failure is not None:
            return
        if self._pings is None:
            self._pings, self._unanswered = self._ping(), set(range(self.size))
        answers = self._pings.poll(self._unanswered, PING_SECONDS)
        failures = [answer for _, answer in answers if isinstance(answer, Failure)]
        if failures and self.essential:
            raise worker_failed(failures)
        if failures:
            self.failure = worker_failed(failures)
        self._unanswered.difference_update(rank for rank, _ in answers)
        if not self._unanswered:
            self._pings = None

    def _ping(self) -> Calls:
        if relays := self._all_relays():
            return relays.ping()
        return DirectCalls([actor.ping.remote() for actor in self._actors], self._places)

    def wait_for_start(self, refs: list[Any], marks: Sequence[str], *, private: bool) -> list[Any]:
        """Run `_wait` on the first call of each rank. marks, private: of the processes (`StartWatch`). Raises WorkerFailed if a
        process does not start in time, is stopped or ends."""
        deadline = time.monotonic() + START_SECONDS
        watch = StartWatch(private=private, limit=START_SECONDS)

        def check() -> None:
            self._cluster.check_services()
            for place, node in zip(self._places, self.nodes, strict=True):
                if not is_alive(node):
                    raise WorkerFailed(Failure.death(place, LEFT_BEFORE_START))
            late = set(ray_wait(refs, num_returns=len(refs), timeout=0)[1])
            ranks = [rank for rank, ref in enumerate(refs) if ref in late]
            self._check_starting(ranks, marks, watch)
            if time.monotonic() > deadline:
                note = f"\n{len(ranks)} of {len(refs)} processes had not replied." if len(ranks) > 1 else ""
                raise WorkerFailed(not_started(self._places[ranks[0] if ranks else 0], START_SECONDS), note)

        return self._wait(DirectCalls(refs, self._places), check)

    def _check_starting(self, ranks: Sequence[int], marks: Sequence[str], watch: StartWatch) -> None:
        """Raise WorkerFailed if one of the `ranks`, which have not replied, is stopped or has ended."""
        watch.look({marks[rank]: self.nodes[rank] for rank in ranks})
        for rank in ranks:
            self._places[rank] = watch.place(marks[rank], self._places[rank])
            if (failure := watch.failure(marks[rank], self._places[rank])) is not None:
                watch.kill(marks[rank], self.nodes[rank], wait=True)
                raise WorkerFailed(failure)

    def _wait_watched(self, calls: Calls, doing: str, called: Collection[int] | None = None) -> list[Any]:
        """Run `_wait` with the watches of stopped processes and of progress. `doing`: the call's name, for messages."""
        relays = self._relays.processes() if self._relays is not None else []
        places = self._places + [place for place, _ in relays]
        watch = RayWatch(places, self.nodes + [node for _, node in relays], doing)
        stall = StallWatch(self.stacks, self._cluster.stall)

        def check() -> None:
            self._cluster.check_services()
            watch.check()
            stall.check()

        self._call, self._call_began = doing, time.monotonic()
        try:
            return self._wait(calls, check, called)
        finally:
            self._call = ""

    def stacks(self, full: bool) -> GroupStacks:
        """Read the states of the ranks. Callable from any thread."""
        call, seconds = self._call, time.monotonic() - self._call_began
        states = read_stacks_on_nodes([place.pid for place in self._places], self.nodes, full)
        return GroupStacks(self._name, self._places, states, call, seconds)

    def _wait(self, calls: Calls, check: Callable[[], None], called: Collection[int] | None = None) -> list[Any]:
        """Wait for the ranks `called`, by default all, and return their values, and None for the others."""
        try:
            return collect(self.size, calls.poll, check, called)
        except ClusterError as error:
            if self.essential or not isinstance(error, WorkerFailed):
                self._cluster.shutdown()
            raise
