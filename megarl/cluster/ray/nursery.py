"""Ray actor of the keeper (`megarl.cluster.keeper`) that starts the workers of a run, and so owns them.

Ray ends an actor with its owner. Workers that the controller starts itself end with it; workers of the nursery end with the keeper's
job, on every machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from megarl.cluster.ray.actors import ServiceActor, TrainerActor

NAME = "megarl-nursery"  # of the actor, in the keeper's namespace
# Wrapped once: Ray serializes and exports the class again for each `ray.remote` of it, which takes 30 ms.
KINDS: Mapping[str, Any] = {"trainer": ray.remote(TrainerActor), "service": ray.remote(ServiceActor)}


@dataclass(frozen=True)
class Kept:
    """Workers of an earlier controller. actors: by name, also ones that have died. reservation: of their devices
    (`RayDevices.reservation`); None: there is none, or it has changed since."""

    actors: dict[str, Any] = field(default_factory=dict)
    reservation: Any = None


class Nursery:
    """Starts actors and reserves devices for one controller at a time."""

    def __init__(self) -> None:
        self._controller = 0
        self._actors: dict[str, Any] = {}
        self._groups: list[PlacementGroup] = []
        self._reservation: Any = None

    def attach(self, pid: int) -> Kept:
        """Serve the controller with the process id `pid`. Returns the workers of the one before."""
        self._controller = pid
        return Kept(dict(self._actors), self._reservation)

    def controller(self) -> tuple[int, bool]:
        """Return the controller's process id (0: there was none), and whether there are workers or reservations."""
        return self._controller, bool(self._actors or self._groups)

    def start(self, kind: str, name: str, options: dict[str, Any], args: tuple[Any, ...]) -> Any:
        """Start an actor of `KINDS`, and return it. It replaces one with the same name, which must have been killed."""
        actor = KINDS[kind].options(**options).remote(*args)
        self._actors[name] = actor
        return actor

    def reserve(self, bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> PlacementGroup:
        """Create a placement group of `bundles`, which ends with this actor."""
        group = placement_group(bundles, bundle_label_selector=selectors)
        self._groups.append(group)
        return group

    def remember(self, reservation: Any) -> None:
        """Keep the devices of the workers for the next controller. None: they have changed, so that no worker can be kept."""
        self._reservation = reservation

    def end(self) -> None:
        """Kill all workers and release their devices."""
        actors, groups = self._actors, self._groups
        self._actors, self._groups, self._reservation = {}, [], None
        for actor in actors.values():
            ray.kill(actor)
        for group in groups:
            with contextlib.suppress(ValueError):  # it is removed already
                ray.util.remove_placement_group(group)
