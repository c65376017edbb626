"""Order in which actor, critic and engines occupy the devices, and the moment at which engines receive new weights.

A step calls `give_to_critic`, `give_to_actor` and `update_engines`. Only this file distinguishes engines that share the
trainers' devices, engines on other devices, and runs without engines (SFT, DPO).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megarl.cluster.calls import wait_for_all
from megarl.cluster.failures import ClusterError, WorkerFailed
from megarl.types import Metrics
from megarl.weight_sync.publish import ReceivingEngine, SendingTrainers, publish
from megarl.weight_sync.session import Session, UpdateReport, WeightSyncError

T = TypeVar("T")


class Placement:
    """Gives the devices to the part of the run that computes next. In this class: a run without engines."""

    def give_to_critic(self) -> None:
        """Prepare the devices for the critic."""

    def give_to_actor(self) -> None:
        """Prepare the devices for the actor."""

    def update_engines(self, version: int) -> Metrics:
        """Send the actor's weights to the engines as `version`, and let the engines sample. Returns the sync's metrics."""
        return {}

    def reclaim(self) -> None:
        """Give the devices to the trainers for the rest of the run, whatever the engines do. They cannot sample any more."""

    def prepare_trainers_restart(self) -> None:
        """Prepare the devices for new trainer processes. The next update opens a new session."""

    @property
    def outlives_trainers(self) -> bool:
        """False after an update that failed, if the engines cannot restart: they may have parts of the new weights."""
        return True


class OffloadingTrainers(Protocol):
    """Trainers that can move their tensors to host memory."""

    def onload(self) -> None: ...

    def offload_optimizer(self) -> None: ...

    def offload_weights(self) -> None: ...


class SleepingEngine(ReceivingEngine, Protocol):
    """An engine that can free its device memory."""

    def sleep(self) -> Future[None]: ...

    def wake(self, tag: str) -> Future[None]: ...

    def pause(self) -> Future[None]: ...

    def resume(self) -> Future[None]: ...

    def stop(self) -> None:
        """End the process."""


class EnginesUpdate:
    """Updates of the same engines in one session, or in a new one after `end_session`, when the trainers' processes are new."""

    def __init__(
        self,
        trainers: SendingTrainers,
        engines: Sequence[ReceivingEngine],
        session: Session,
        open_session: Callable[[], Session],
    ):
        self.trainers, self.engines, self.open_session = trainers, list(engines), open_session
        self.session: Session | None = session
        self.was_interrupted = False  # engines have ended, or have parts of an update

    def __call__(self, version: int) -> Metrics:
        if self.session is None:
            self.session = self.open_session()
        self.was_interrupted = True
        metrics = publish(self.trainers, self.engines, self.session, version)
        self.was_interrupted = False
        return metrics

    def end_session(self) -> None:
        self.session = None


class Disaggregated(Placement):
    """Actor, critic and engines have separate devices. update: sends the actor's weights to the engines as a version."""

    def __init__(self, update: EnginesUpdate):
        self.update = update

    def update_engines(self, version: int) -> Metrics:
        return self.update(version)

    def prepare_trainers_restart(self) -> None:
        self.update.end_session()

    @property
    def outlives_trainers(self) -> bool:
        return not self.update.was_interrupted


class EngineFleet(Protocol):
    """Engines that may die while the run goes on (`megarl.rollout.fleet.fleet.Fleet`)."""

    def poll(self) -> None: ...

    def members(self) -> list[tuple[int, int]]: ...

    def update(self) -> AbstractContextManager[None]: ...

    def follow_update(self, member: tuple[int, int], update: Future[Any]) -> None: ...

    def updated(self, members: Sequence[tuple[int, int]]) -> None: ...

    def restart_all(
        self, members: Sequence[tuple[int, int]], error: Exception, check: Callable[[], None], limit: float
    ) -> None: ...

    def end_and_restart(
        self, members: Sequence[tuple[int, int]], cause: str, check: Callable[[], None], limit: float
    ) -> None: ...


@dataclass(frozen=True)
class _FollowedEngine:
    """An engine that reports the end of each call to the fleet."""

    engine: ReceivingEngine
    member: tuple[int, int]
    fleet: EngineFleet

    @property
    def name(self) -> str:
        return self.engine.name

    def connect_weight_sync(self, session: Session) -> Future[str | None]:
        return self._follow(self.engine.connect_weight_sync(session))

    def update_weights(self, version: int) -> Future[UpdateReport]:
        return self._follow(self.engine.update_weights(version))

    def _follow(self, call: Future[T]) -> Future[T]:
        self.fleet.follow_update(self.member, call)
        return call


class DisaggregatedFleet(Placement):
    """Actor, critic and engines have separate devices, and engines may die while the run goes on.

    A session has a fixed list of engines; a changed list opens a new session. Its first update is compared with the export.
    """

    def __init__(
        self,
        trainers: SendingTrainers,
        engines: Sequence[ReceivingEngine],
        session: Session,
        members: list[tuple[int, int]],
        fleet: EngineFleet,
        open_session: Callable[[list[ReceivingEngine], list[int]], Session],
        check: Callable[[], None],
        start_timeout: float,
    ):
        """engines: may grow. session: of `members`. open_session: opens one for engines, with their indices. check: of the run's processes."""
        self.trainers, self.engines, self.session, self.members = trainers, engines, session, members
        self.fleet, self.open_session = fleet, open_session
        self.check, self.start_timeout = check, start_timeout
        self.unfinished: list[tuple[int, int]] | None = (
            None  # members of an update that a failure of a trainer has ended
        )

    def update_engines(self, version: int) -> Metrics:
        self.fleet.poll()
        waited = 0.0  # for engines to restart
        with self.fleet.update():
            if self.unfinished is not None:  # the trainers have started again
                began = time.perf_counter()
                self.fleet.end_and_restart(self.unfinished, "a trainer failed", self.check, self.start_timeout)
                waited += time.perf_counter() - began
                self.unfinished = None
            while True:
                members = self.fleet.members()
                try:
                    metrics = self._update(members, version)
                except WorkerFailed:
                    raise
                except (WeightSyncError, ClusterError) as error:
                    began = time.perf_counter()
                    self.fleet.restart_all(members, error, self.check, self.start_timeout)
                    waited += time.perf_counter() - began
                    self.unfinished = None
                    continue
                self.fleet.updated(members)
                return {**metrics, "fleet/restart_seconds": waited}

    def prepare_trainers_restart(self) -> None:
        self.members = []  # no engine belongs to the new trainers' session

    def _update(self, members: list[tuple[int, int]], version: int) -> Metrics:
        engines: list[ReceivingEngine] = [
            _FollowedEngine(self.engines[member[0]], member, self.fleet) for member in members
        ]
        if members != self.members:
            self.session, self.members = self.open_session(engines, [index for index, _ in members]), members
        self.unfinished = members
        metrics = publish(self.trainers, engines, self.session, version)
        self.unfinished = None
        return metrics


class Occupant:
    """Trainers or a critic on shared devices. `offload`: move the tensors to host memory while others compute."""

    def __init__(self, trainers: OffloadingTrainers, *, offload: bool):
        self.trainers, self.may_offload = trainers, offload
        self.on_device = True

    def onload(self) -> None:
        if not self.on_device:
            self.trainers.onload()
            self.on_device = True

    def offload(self, between: Callable[[], None] = lambda: None) -> None:
        """Offload optimizer and gradients, call `between`, then offload the weights."""
        offloads = self.may_offload and self.on_device
        if offloads:
            self.trainers.offload_optimizer()
        between()
        if offloads:
            self.trainers.offload_weights()
            self.on_device = False


class Colocated(Placement):
    """Actor, critic and engines time-share the same devices."""

    def __init__(
        self,
        actor: Occupant,
        critic: Occupant | None,
        engines: Sequence[SleepingEngine],
        update: EnginesUpdate,
        *,
        engines_sleep: bool,
        engines_asleep: bool,
        requests_wait: bool = False,
        start_timeout: float,
    ):
        """update: sends the actor's weights to the engines as a version. engines_sleep: engines can free their memory.
        engines_asleep: they have done so. requests_wait: requests may run when engines stop (`rollout.max_staleness` above
        0); they continue after the update. start_timeout: limit for falling asleep and waking, in seconds."""
        self.actor, self.critic, self.engines, self.update = actor, critic, list(engines), update
        self.engines_sleep, self.engines_asleep, self.start_timeout = engines_sleep, engines_asleep, start_timeout
        self.have_weights_alone = False  # engines that are between the two parts of waking up
        self.pauses = requests_wait and not engines_sleep  # an engine that sleeps stops its requests, too
        self.engines_paused = False

    def give_to_critic(self) -> None:
        assert self.critic is not None, "the run has no critic"
        self._sleep_engines()
        self.actor.offload()
        self.critic.onload()

    def give_to_actor(self) -> None:
        self._sleep_engines()
        if self.critic is not None:
            self.critic.offload()
        self.actor.onload()

    def update_engines(self, version: int) -> Metrics:
        """Send the weights at the moment of least memory: both sides hold weights, and nothing else."""
        self.give_to_actor()
        metrics: Metrics = {}

        def update() -> None:
            self._wake_engines("weights")
            self.have_weights_alone = self.engines_asleep
            metrics.update(self.update(version))

        self.actor.offload(update)
        self._wake_engines("kv_cache")
        self.engines_asleep = self.have_weights_alone = False
        if self.engines_paused:
            self._wait([engine.resume() for engine in self.engines], doing="resume")
            self.engines_paused = False
        return metrics

    def reclaim(self) -> None:
        if self.actor.on_device and (self.critic is None or self.critic.on_device):
            return
        # Requests may run. Not every engine can sleep with requests, and none of them is needed any more.
        with ThreadPoolExecutor(len(self.engines)) as threads:
            list(threads.map(lambda engine: engine.stop(), self.engines))
        self.engines_sleep = self.pauses = False
        self.give_to_actor()

    def prepare_trainers_restart(self) -> None:
        if self.have_weights_alone:
            self._wake_engines("kv_cache")
            self.engines_asleep = self.have_weights_alone = False
        self._sleep_engines()
        self.update.end_session()

    @property
    def outlives_trainers(self) -> bool:
        return not self.update.was_interrupted

    def _sleep_engines(self) -> None:
        if self.engines_sleep and not self.engines_asleep:
            self._wait([engine.sleep() for engine in self.engines], doing="go to sleep")
            self.engines_asleep = True
        if self.pauses and not self.engines_paused:
            self._wait([engine.pause() for engine in self.engines], doing="pause")
            self.engines_paused = True

    def _wake_engines(self, tag: str) -> None:
        if self.engines_asleep:
            self._wait([engine.wake(tag) for engine in self.engines], doing=f"wake its {tag}")

    def _wait(self, calls: Sequence[Future[None]], *, doing: str) -> None:
        wait_for_all(self.engines, calls, doing=doing, key="rollout.start_timeout", limit=self.start_timeout)
