"""Calls to the ranks of a group over Ray, in flight: direct ones, and ones that a relay on each node passes on.

A call of an actor costs its caller 0.2 ms of CPU. A large group therefore has a relay for each `RANKS` ranks of a node: the controller
calls the relays, and they call the ranks. Call `ray.env.prepare` before importing this module.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.failures import COMMUNICATION_GRACE, Failure, ProcessInfo, Raised, Returned
from megarl.cluster.ray.failures import death_cause
from megarl.cluster.ray.signals import ray_get, ray_wait
from megarl.cluster.stacks.report import format_ranks

DIRECT_RANKS = 32  # the most ranks of a group without relays
RANKS = 16  # the most ranks of a relay
EQUAL_FAILURES = 0.1  # seconds that a relay waits for further ranks after the first failure

Outcome = Returned | Failure


class Calls(Protocol):
    """One call of each of several ranks."""

    def poll(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Outcome]]:
        """Wait for `ranks`, at most `seconds`. Returns the new outcomes. `ranks` must be all ranks with an unfinished call."""
        ...


class DirectCalls:
    """Calls of the ranks themselves. refs: by rank; None: the rank is not called."""

    def __init__(self, refs: Sequence[Any], places: Sequence[ProcessInfo]) -> None:
        self._refs, self._places = refs, places

    def poll(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Outcome]]:
        rank_of = {self._refs[rank]: rank for rank in ranks}
        ready, _ = ray_wait(list(rank_of), num_returns=len(rank_of), timeout=seconds)
        return [(rank_of[ref], outcome_of(self._places[rank_of[ref]], ref)) for ref in ready]


def outcome_of(place: ProcessInfo, ref: Any) -> Outcome:
    """Return the outcome of an ended call of the rank at `place`."""
    try:
        outcome = ray_get(ref)
    except RayActorError as error:
        return Failure.death(place, death_cause(error))
    except RayError as error:
        return Failure.raised(place, Raised.of(error))
    return outcome if isinstance(outcome, Returned) else Failure.raised(place, outcome)


class RelayActor:
    """Passes calls on to ranks, and returns their outcomes. actors, places: of the `ranks`."""

    def __init__(self, ranks: Sequence[int], actors: Sequence[Any], places: Sequence[ProcessInfo]) -> None:
        self._ranks, self._actors, self._places = ranks, actors, dict(zip(ranks, places, strict=True))
        self._pending: dict[Any, int] = {}  # rank by reference of its call

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def call(self, method: str, arguments: Sequence[Any]) -> list[tuple[int, Outcome]]:
        """Run ``method(*arguments[i])`` on the i-th rank, and `outcomes`. An entry may be a reference to the arguments."""
        calls = [actor.call.remote(method, args) for actor, args in zip(self._actors, arguments, strict=True)]
        self._pending = dict(zip(calls, self._ranks, strict=True))
        return self.outcomes()

    def ping(self) -> list[tuple[int, Outcome]]:
        """Ping each rank, and return `outcomes`."""
        self._pending = dict(zip([actor.ping.remote() for actor in self._actors], self._ranks, strict=True))
        return self.outcomes()

    def outcomes(self) -> list[tuple[int, Outcome]]:
        """Wait until all ranks have ended the call, or one has failed. Returns the outcomes that were not returned before."""
        ended: list[tuple[int, Outcome]] = []
        failed = False
        while self._pending and not failed:
            new = self._ended(1, None)
            failed = any(isinstance(outcome, Failure) for _, outcome in new)
            ended += new
        return ended + self._ended(len(self._pending), EQUAL_FAILURES) if self._pending else ended

    def _ended(self, count: int, seconds: float | None) -> list[tuple[int, Outcome]]:
        ready, _ = ray_wait(list(self._pending), num_returns=count, timeout=seconds)
        ranks = [(self._pending.pop(ref), ref) for ref in ready]
        return [(rank, outcome_of(self._places[rank], ref)) for rank, ref in ranks]


_RELAY = ray.remote(num_cpus=0, max_restarts=0)(RelayActor)


@dataclass
class RankRelay:
    """A relay as the controller sees it. node: Ray's. pid: reference of its process id. actors, places: of its `ranks`."""

    actor: Any
    place: ProcessInfo  # without a process id until `locate` has read it
    node: str
    pid: Any
    ranks: list[int]
    actors: list[Any]
    places: list[ProcessInfo]

    def locate(self) -> ProcessInfo:
        """Return `place`, with the process id if the process has started. Does not wait."""
        if not self.place.pid and ray_wait([self.pid], timeout=0)[0]:
            with contextlib.suppress(RayError):  # it has died: the next call fails with the cause
                self.place = replace(self.place, pid=ray_get(self.pid))
        return self.place


class Relays:
    """The relays of a group. nodes: Ray's node of each rank. env: variables of the relays' processes."""

    def __init__(
        self, name: str, actors: Sequence[Any], places: Sequence[ProcessInfo], nodes: Sequence[str], env: dict[str, str]
    ) -> None:
        self._relays: list[RankRelay] = []
        for node in dict.fromkeys(nodes):
            here = [rank for rank, home in enumerate(nodes) if home == node]
            for begin in range(0, len(here), RANKS):
                ranks = here[begin : begin + RANKS]
                here_actors, here_places = [actors[rank] for rank in ranks], [places[rank] for rank in ranks]
                actor = _RELAY.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    runtime_env={"env_vars": env},
                ).remote(ranks, here_actors, here_places)
                place = ProcessInfo(f"relay of {name} {format_ranks(ranks)}", places[ranks[0]].host)
                self._relays.append(RankRelay(actor, place, node, actor.pid.remote(), ranks, here_actors, here_places))

    def processes(self) -> list[tuple[ProcessInfo, str]]:
        """Return the place and node of each relay that has started. Does not wait."""
        return [(relay.place, relay.node) for relay in self._relays if relay.locate().pid]

    def call(self, method: str, arguments: Sequence[Any]) -> RelayedCalls:
        """Run ``method(*arguments[r])`` on each rank r. An entry may be a reference to the arguments."""
        refs = [relay.actor.call.remote(method, [arguments[rank] for rank in relay.ranks]) for relay in self._relays]
        return RelayedCalls(self._relays, refs)

    def ping(self) -> RelayedCalls:
        """Ping each rank."""
        return RelayedCalls(self._relays, [relay.actor.ping.remote() for relay in self._relays])

    def kill(self) -> None:
        for relay in self._relays:
            ray.kill(relay.actor)


class RelayedCalls:
    """Calls of all ranks of a group by its relays. refs: of the relays' replies."""

    def __init__(self, relays: Sequence[RankRelay], refs: Sequence[Any]) -> None:
        self._relay_of = dict(zip(refs, relays, strict=True))  # of the replies that have not come
        self._pending = {rank for relay in relays for rank in relay.ranks}

    def poll(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Outcome]]:
        if not self._relay_of:  # relays have died, and the ends of their ranks will not become known
            time.sleep(seconds)
            return []
        ready, _ = ray_wait(list(self._relay_of), num_returns=len(self._relay_of), timeout=seconds)
        return [outcome for ref in ready for outcome in self._read(ref)]

    def _read(self, ref: Any) -> list[tuple[int, Outcome]]:
        relay = self._relay_of.pop(ref)
        try:
            outcomes: list[tuple[int, Outcome]] = ray_get(ref)
        except RayError as error:
            return _failures_without(relay, error)
        self._pending.difference_update(rank for rank, _ in outcomes)
        if self._pending.intersection(relay.ranks):
            self._relay_of[relay.actor.outcomes.remote()] = relay
        return outcomes


def _failures_without(relay: RankRelay, error: RayError) -> list[tuple[int, Outcome]]:
    """Return the failures of a relay's ranks after the relay has failed; the relay's failure if all its ranks are alive."""
    pings = [actor.ping.remote() for actor in relay.actors]
    ready, _ = ray_wait(pings, num_returns=len(pings), timeout=COMMUNICATION_GRACE)
    places = dict(zip(pings, zip(relay.ranks, relay.places, strict=True), strict=True))
    outcomes = [(rank, outcome_of(place, ref)) for ref, (rank, place) in places.items() if ref in ready]
    failures: list[tuple[int, Outcome]] = [each for each in outcomes if isinstance(each[1], Failure)]
    if isinstance(error, RayActorError):
        failure = Failure.death(relay.locate(), death_cause(error))
    else:
        failure = Failure.raised(relay.locate(), Raised.of(error))
    return failures or [(relay.ranks[0], failure)]
