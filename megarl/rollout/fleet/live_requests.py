"""Answers of a live run to `megarl engines` and to the launcher of a machine that ends. They are called in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster.base import Cluster, Service
from megarl.engines.base import engine_name
from megarl.errors import pluralize
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.fleet.states import EngineState

_WITH_WEIGHTS = (EngineState.SERVING, EngineState.LEAVING)
_WITH_PROCESS = (*_WITH_WEIGHTS, EngineState.LOADED)


def why_fixed(recipe: Recipe, transport: str) -> str | None:
    """Return why the number of a run's engines cannot change; None if it can."""
    rollout = recipe.rollout
    if recipe.cluster.placement == "colocated":
        return "its engines share the trainers' devices (cluster.placement=colocated)"
    if rollout.data_parallel > 1:
        return f"its engines run in groups of {rollout.data_parallel} (rollout.data_parallel)"
    if rollout.min_engines is None:
        return "it has no rollout.min_engines. Resume it with this setting: it allows engines to leave and to join"
    if transport != "ray":
        return "torchrun starts its processes: start it without torchrun, on Ray"
    return None


@dataclass(frozen=True)
class EngineRequests:
    """The requests ``engines [N]`` and ``leave RANK SECONDS``.

    engines: of the run. fleet: None if their number is fixed, with the reason `fixed`. versions, groups: by engine.
    """

    recipe: Recipe
    cluster: Cluster
    engines: Sequence[EngineHandle]
    fleet: Fleet | None
    fixed: str | None
    versions: Callable[[], Sequence[int | None]]
    groups: Callable[[], Mapping[int, int]]
    # Held while a request changes the wanted number, so that each of two simultaneous +1 counts. Not the fleet's lock: the count
    # of free devices waits for Ray.
    changing: threading.Lock = field(default_factory=threading.Lock)

    def answer_engines(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the engines, after a change of the wanted number if `words` has one: 4, +1 or -1. ``refused``: the reason."""
        if not words:
            return self._listed()
        if self.fleet is None or self.fixed is not None:
            return {"refused": f"the number of its engines is fixed: {self.fixed}"}
        with self.changing:
            before, change = self.fleet.wanted, int(words[0])
            target = before + change if words[0][0] in "+-" else change
            problem = self._problem(target)
            if problem is not None:
                return {"refused": problem}
            if target != before:
                self.fleet.set_wanted(target)
        return {**self._listed(), "before": before}

    def answer_leave(self, words: Sequence[str]) -> dict[str, Any]:
        """Let the engines of a machine leave. words: its node rank in launch/multinode.sh, and the seconds until it ends. Returns the
        names of the engines that it still has; ``refused``: the reason why the run cannot go on without the machine."""
        if self.fleet is None or self.fixed is not None:
            return {"refused": f"the number of its engines is fixed: {self.fixed}"}
        fleet, seconds = self.fleet, float(words[1])

        def engines_of(services: Sequence[Service]) -> list[int]:
            return [index for index, engine in enumerate(fleet.engines) if engine.service in services]

        def agree(services: Sequence[Service]) -> str | None:
            sampling = {engine_name(index) for index in range(len(fleet.engines) + 1)}  # one more may be starting
            for service in services:
                if service.name not in sampling:
                    return f"{service.name} is on it, and would wait for devices of another machine"
            return fleet.leave_machine(engines_of(services), seconds)

        services, problem = self.cluster.leave_machine(int(words[0]), agree)
        if problem is not None:
            return {"refused": problem}
        return {"engines": [engine_name(each) for each in engines_of(services)]}

    def _problem(self, target: int) -> str | None:
        assert self.fleet is not None
        with self.fleet.lock:
            can_stay = self.fleet.can_stay()
            more = target - len(self.fleet.states.staying) - len(can_stay)
            leavers = [each.engine for each in self.fleet.leaving() if not each.at_once]
            ending = [engine_name(engine) for engine in leavers if engine not in can_stay]
        if target < self.fleet.least:
            return (
                f"{pluralize(target, 'engine')} would be fewer than rollout.min_engines = {self.fleet.least}. To go lower, stop the run "
                "and resume it with another value"
            )
        size = self.recipe.rollout.tensor_parallel
        free = self.cluster.free_services(size) if more > 0 else None
        if free is not None and more > free:
            each = f" ({size} on one machine for each: rollout.tensor_parallel)" if size > 1 else ""
            fewer = f", or ask for {free} more at most" if free else ""
            if ending:
                fewer += (
                    f", or ask again when {', '.join(ending)}, which {'leaves' if len(ending) == 1 else 'leave'} now, "
                )
                fewer += f"{'has' if len(ending) == 1 else 'have'} left"
            return (
                f"{pluralize(more, 'more engine')} would need free devices{each}, and the Ray cluster has enough for {free}. Add a "
                f"machine{fewer}"
            )
        return None

    def _listed(self) -> dict[str, Any]:
        fixed = self.fleet is None or self.fixed is not None
        result: dict[str, Any] = {"engines": self._rows(), "fixed": self.fixed}
        if self.fleet is not None:
            with self.fleet.lock:
                result |= {"wanted": self.fleet.states.wanted, "least": self.fleet.least}
        if not fixed:
            result["free"] = self.cluster.free_services(self.recipe.rollout.tensor_parallel)
        return result

    def _rows(self) -> list[dict[str, Any]]:
        groups, versions = self.groups(), self.versions()
        rows = []
        for index, state, deaths in self._states():
            if state is EngineState.GONE:
                continue
            has_handle = index < len(self.engines)
            service = self.engines[index].service if has_handle else None
            has_version = state in _WITH_WEIGHTS and index < len(versions)
            rows.append(
                {
                    "name": engine_name(index),
                    "state": state.value,
                    "host": service.host if service is not None and state in _WITH_PROCESS else None,
                    "devices": service.device_names if service is not None and state is not EngineState.DEAD else "",
                    "version": versions[index] if has_version else None,
                    "groups": groups.get(index, 0),
                    "deaths": deaths,
                }
            )
        return rows

    def _states(self) -> list[tuple[int, EngineState, int]]:
        """Return index, state and deaths of each engine."""
        if self.fleet is None:
            return [(index, EngineState.SERVING, 0) for index in range(len(self.engines))]
        with self.fleet.lock:
            states = self.fleet.states
            return [(index, states.state(index), states.deaths_of(index)) for index in range(states.count)]
