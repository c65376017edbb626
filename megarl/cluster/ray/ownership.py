"""Owners of the processes of a run: the controller, or a keeper that outlives it. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from megarl.cluster.failures import ProcessInfo, host_name
from megarl.cluster.keeper import KeeperAddress
from megarl.cluster.orphan_reaper import VARIABLE, OrphanReaper
from megarl.cluster.ray.devices import RayDevices
from megarl.cluster.ray.nursery import KINDS, NAME, Kept
from megarl.cluster.ray.processes import KeepersRayProcess, RayProcessWatch, private_processes
from megarl.cluster.ray.service import wait_for_end
from megarl.cluster.ray.signals import ray_get, ray_wait
from megarl.cluster.ray.start import start
from megarl.errors import ProcessFailure

END_SECONDS = 60.0  # time for killed workers to end, which frees their memory


@dataclass(frozen=True)
class KeptWorker:
    """A trainer or service of an earlier controller. has_shutdown: its object has a ``shutdown``."""

    actor: Any
    place: ProcessInfo
    has_shutdown: bool


class ControllersProcesses:
    """The controller owns the processes: they end with it.

    If it is already connected to Ray, that connection is used and stays open.
    """

    def __init__(self, address: str | None) -> None:
        self._reaper, self._address = OrphanReaper(), address
        self.not_taken: list[str] = []  # always empty
        self.env = self._reaper.env
        self._owns_ray, self.watch = not ray.is_initialized(), RayProcessWatch([])
        self.private = self._owns_ray and not address  # all processes are on this machine

    def connect(self) -> None:
        if self._owns_ray:
            start(self._address, self._reaper)
            self.watch = RayProcessWatch(private_processes())

    def reserve(self, devices: RayDevices) -> None:
        devices.reserve()

    def start(self, kind: str, name: str, options: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
        """Start an actor of `KINDS`, and return it."""
        return KINDS[kind].options(**options).remote(*args)

    def take_trainers(self, names: Sequence[str], settings: str) -> list[KeptWorker]:
        """Return no trainer: an earlier controller's trainers have ended with it."""
        return []

    def take_service(self, name: str, settings: str) -> KeptWorker | None:
        """Return None: the services of an earlier controller have ended with it."""
        return None

    def close(self) -> None:
        """End Ray, if this object has started or joined it, and all processes that are left. Idempotent."""
        if self._owns_ray:
            self._owns_ray = False
            if self.watch.failure is None:  # calls to Ray would hang, or end this process
                ray.shutdown()
                os.environ.pop(VARIABLE, None)
        self._reaper.close()


class KeepersProcesses:
    """A keeper owns the processes (`megarl.cluster.keeper`): they outlive a controller that dies, and the next one takes them."""

    def __init__(self, keeper: KeeperAddress) -> None:
        self._keeper, self.private = keeper, keeper.private
        self.env = {VARIABLE: keeper.mark, "SPT_NOENV": "1"}
        self.watch = RayProcessWatch([])
        self._nursery: Any = None
        self.not_taken: list[str] = []  # see `Cluster.not_taken`
        self._actors: dict[str, Any] = {}  # of the previous controller, by name; `take_...` removes them
        self._answers: dict[str, Any] = {}  # their replies to `release`, by name

    def connect(self) -> None:
        try:
            start(self._keeper.address, None)
            self._nursery = ray.get_actor(NAME, namespace=self._keeper.namespace)
            kept: Kept = ray_get(self._nursery.attach.remote(os.getpid()))
        except (ValueError, RayError) as error:
            raise ProcessFailure(
                f"the process that keeps the workers (train.keep_workers) has ended: {error}"
            ) from error
        self.watch = RayProcessWatch(
            [KeepersRayProcess(*process, self._keeper.pid) for process in self._keeper.processes]
        )
        self._actors, self._reservation = kept.actors, kept.reservation
        self._answers = {name: actor.release.remote() for name, actor in kept.actors.items()}

    def reserve(self, devices: RayDevices) -> None:
        """Take the devices of the controller before, or end its workers and reserve devices."""

        def create(bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> Any:
            return ray_get(self._nursery.reserve.remote(bundles, selectors))

        def forget() -> None:
            ray_get(self._nursery.remember.remote(None))

        if self._reservation is not None and devices.adopt(self._reservation, create, forget):
            return
        self._end([*self._actors])
        ray_get(self._nursery.end.remote())
        devices.reserve(create, forget)
        ray_get(self._nursery.remember.remote(devices.reservation()))

    def start(self, kind: str, name: str, options: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
        """Let the keeper start an actor of `KINDS`, and return it."""
        return ray_get(self._nursery.start.remote(kind, name, options, args))

    def take_trainers(self, names: Sequence[str], settings: str) -> list[KeptWorker]:
        """Return the trainers `names` of the controller before, if all of them live and have these `settings`, otherwise none.

        Waits for a call that still runs, for `train.keep_workers` at most. Trainers that are not returned have ended.
        """
        return self._take(names, settings)

    def take_service(self, name: str, settings: str) -> KeptWorker | None:
        """Return the service `name` of the controller before, without its requests; see `take_trainers`."""
        return next(iter(self._take([name], settings)), None)

    def _take(self, names: Sequence[str], settings: str) -> list[KeptWorker]:
        answers = [self._answers[name] for name in names if name in self._answers]
        if answers:
            ray_wait(answers, num_returns=len(answers), timeout=self._keeper.seconds if settings else 0)
        workers = [self._kept(name, settings) for name in names]
        kept = [worker for worker in workers if worker is not None]
        if settings:
            alike = f", so that all {len(names)} of them start again" if len(names) > 1 else ""
            self.not_taken += [f"{name} {why}{alike}" for name in names if (why := self._why_not(name, settings))]
        if not settings or len(kept) < len(names):
            self._end([name for name in names if name in self._actors])
            return []
        for name in names:
            del self._actors[name], self._answers[name]
        return kept

    def _kept(self, name: str, settings: str) -> KeptWorker | None:
        """Return the worker `name`; None if it is busy, has ended or has other settings."""
        place, of_worker, has_shutdown = self._answer(name)
        if place is None or of_worker != settings:
            return None
        return KeptWorker(self._actors[name], place, has_shutdown)

    def _why_not(self, name: str, settings: str) -> str:
        """Return why the worker `name` of the previous controller cannot go on; "" if it can, or if there was none."""
        if name not in self._answers:
            return ""
        try:
            _, of_worker, _ = ray_get(self._answers[name], timeout=0)
        except GetTimeoutError:
            return f"is busy with a call, and has not ended it within train.keep_workers = {self._keeper.seconds:g} s"
        except RayError:
            return "has ended"
        if not of_worker:
            return "cannot serve another controller: a call to it has failed, or its engine has"
        return "" if of_worker == settings else "has other settings"

    def _answer(self, name: str) -> tuple[ProcessInfo | None, str, bool]:
        """Return place, digest of the settings and presence of a ``shutdown`` of a worker that has replied."""
        if name not in self._answers:
            return None, "", False
        try:
            answer: tuple[ProcessInfo, str, bool] = ray_get(self._answers[name], timeout=0)
        except RayError:  # also GetTimeoutError
            return None, "", False
        return answer

    def _end(self, names: Sequence[str]) -> None:
        """Kill workers of the controller before, and wait for their end: others take their devices."""
        places = [place for place, _, _ in map(self._answer, names) if place is not None]
        ends = []
        for name in names:
            actor = self._actors.pop(name)
            ray.kill(actor)
            ends.append((actor.lifetime if name.startswith("service ") else actor.ping).remote())
            self._answers.pop(name)
        if ends:
            ray_wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        wait_for_end([place.pid for place in places if place.host == host_name()], END_SECONDS)

    def close(self) -> None:
        """End all workers, and disconnect from Ray. Idempotent."""
        if self._nursery is None:
            return
        nursery, self._nursery = self._nursery, None
        if self.watch.failure is None:
            ray_get(nursery.end.remote())
            ray.shutdown()


Owner = ControllersProcesses | KeepersProcesses


def owner_of(address: str | None, keeper: KeeperAddress | None) -> Owner:
    """Return the owner of the processes: `keeper` if there is one. address: of a Ray cluster; None starts a private one."""
    return ControllersProcesses(address) if keeper is None else KeepersProcesses(keeper)
