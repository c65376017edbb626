"""Relays between the controller and many trainers. Call `ray.env.prepare` before importing this module.

A call costs the controller about half a millisecond for each actor that it calls, and a step makes several calls. In a group of
more than `RANKS_OF_RELAY` trainers, it calls relays, each of which calls its ranks.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.failures import COMMUNICATION_GRACE, GRACE, Failure, ProcessInfo, Returned, WorkerFailed, host_name
from megarl.cluster.ray.calls import Calls, failure_of, outcome_of
from megarl.cluster.ray.failures import not_started
from megarl.cluster.ray.signals import ray_get

RANKS_OF_RELAY = 32
CONCURRENT_CALLS = 100  # of one relay: a call, and pings that wait for it


class Relay:
    """Hosted by an async actor: forwards the controller's calls to the trainers `ranks`."""

    def __init__(self, ranks: Sequence[int], actors: Sequence[Any], places: Sequence[ProcessInfo]) -> None:
        self._ranks, self._actors, self._places = ranks, actors, places

    async def where(self, name: str) -> ProcessInfo:
        """Return the place of this process."""
        return ProcessInfo(name, host_name(), os.getpid())

    async def forward(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[tuple[int, Returned | Failure]]:
        """Call the actors' `method` with each rank's arguments. Returns (rank, outcome) of each rank; after a failure only of those
        that answer within the time that `megarl.cluster.failures.collect` gives them."""
        pending = {
            asyncio.ensure_future(self._call(number, getattr(actor, method).remote(*args)))
            for number, (actor, args) in enumerate(zip(self._actors, per_rank, strict=True))
        }
        outcomes: list[tuple[int, Returned | Failure]] = []
        deadline = math.inf
        while pending and time.monotonic() < deadline:
            seconds = None if deadline == math.inf else deadline - time.monotonic()
            done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for rank, outcome in (task.result() for task in done):
                outcomes.append((rank, outcome))
                if isinstance(outcome, Failure):
                    grace = COMMUNICATION_GRACE if outcome.is_communication else GRACE
                    deadline = min(deadline, time.monotonic() + grace)
        for task in pending:
            task.cancel()
        return outcomes

    async def _call(self, number: int, ref: Any) -> tuple[int, Returned | Failure]:
        place = self._places[number]
        try:
            return self._ranks[number], outcome_of(place, await ref)
        except RayError as error:
            return self._ranks[number], failure_of(place, error)


@dataclass(frozen=True)
class StartedRelay:
    """A relay as the controller sees it. `node`: the Ray node of its process."""

    actor: Any
    ranks: range
    place: ProcessInfo
    node: str


class Relays:
    """The relays of a group of trainers; none until `start`, and none for a small group.

    actors, places: of the ranks.
    """

    def __init__(self, actors: Sequence[Any], places: Sequence[ProcessInfo]) -> None:
        self._actors, self._places = actors, places
        self.started: list[StartedRelay] = []

    def start(self, name: str, nodes: Sequence[str], options: dict[str, Any]) -> None:
        """Start the relays of a group with this name. nodes: Ray node of each rank. options: of Ray, for each relay's process."""
        if len(self._actors) <= RANKS_OF_RELAY:
            return
        for first in range(0, len(self._actors), RANKS_OF_RELAY):
            ranks = range(first, min(first + RANKS_OF_RELAY, len(self._actors)))
            here = NodeAffinitySchedulingStrategy(nodes[first], soft=False)
            remote = ray.remote(Relay).options(
                num_cpus=0, max_concurrency=CONCURRENT_CALLS, scheduling_strategy=here, **options
            )
            actors, places = self._actors[first : ranks.stop], self._places[first : ranks.stop]
            place = ProcessInfo(f"relay of {name} ranks {first}-{ranks[-1]}", places[0].host)
            self.started.append(StartedRelay(remote.remote(list(ranks), actors, places), ranks, place, nodes[first]))

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> Calls:
        """Start a call of the actors' `method` with each rank's arguments."""
        if not self.started:
            refs = [getattr(actor, method).remote(*args) for actor, args in zip(self._actors, per_rank, strict=True)]
            return Calls(refs, self._places)
        refs = [
            relay.actor.forward.remote(method, per_rank[relay.ranks.start : relay.ranks.stop]) for relay in self.started
        ]
        return Calls(refs, [relay.place for relay in self.started], [relay.ranks for relay in self.started])

    def wait_for_start(self, seconds: float) -> None:
        """Wait until the processes have started. Raises WorkerFailed if one dies, or takes more than `seconds`."""
        where = [relay.actor.where.remote(relay.place.name) for relay in self.started]
        for number, (relay, ref) in enumerate(zip(self.started, where, strict=True)):
            try:
                self.started[number] = replace(relay, place=ray_get(ref, timeout=seconds))
            except RayActorError as error:
                raise WorkerFailed(failure_of(relay.place, error)) from error
            except GetTimeoutError as error:
                raise WorkerFailed(not_started(relay.place, seconds)) from error

    def kill(self) -> None:
        for relay in self.started:
            ray.kill(relay.actor)
