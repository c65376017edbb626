"""Who holds the devices when, and how new weights reach the engines.

The loop says `to_critic`, `to_train` and `to_rollout`; whether engines and the critic share the trainers' devices,
have their own, or do not exist (SFT) is said here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megarl.cluster.base import Service, WorkerGroup
from megarl.cluster.calls import wait_for_all
from megarl.types import Metrics
from megarl.weight_sync.session import (
    PHASES,
    Session,
    ShardedReport,
    ShardedSession,
    compare_full_reports,
    compare_sharded_reports,
    merge_reports,
)


class Placement(Protocol):
    def to_critic(self) -> None:
        """The critic computes next."""

    def to_train(self) -> None:
        """The actor's trainers compute next."""

    def to_rollout(self, version: int) -> Metrics:
        """The engines sample next, with the trainers' weights as `version`. Returns what the exchange cost."""


class TrainersOnly:
    """No engines: nothing to hand over."""

    def to_critic(self) -> None: ...

    def to_train(self) -> None: ...

    def to_rollout(self, version: int) -> Metrics:
        return {}


class Disaggregated:
    """Engines and critic have devices of their own, and stay there."""

    def __init__(self, trainers: WorkerGroup, services: Sequence[Service], session: Session):
        self.trainers, self.services, self.session = trainers, list(services), session

    def to_critic(self) -> None: ...

    def to_train(self) -> None: ...

    def to_rollout(self, version: int) -> Metrics:
        return publish(self.trainers, self.services, self.session, version)


class Tenant:
    """Trainers or a critic that may leave the devices to others. `offload`: whether they do."""

    def __init__(self, workers: WorkerGroup, *, offload: bool):
        self.workers, self.offload = workers, offload
        self.here = True

    def come(self) -> None:
        if not self.here:
            self.workers.call("onload")
            self.here = True

    def leave(self, between: Callable[[], None] = lambda: None) -> None:
        """Optimizer and gradients go, then `between` happens, then the weights go."""
        going = self.offload and self.here
        if going:
            self.workers.call("offload_optimizer")
        between()
        if going:
            self.workers.call("offload_weights")
            self.here = False


class Colocated(Disaggregated):
    """Engines, trainers and critic take turns on the same devices: one computes while the others are away."""

    def __init__(
        self,
        actor: Tenant,
        critic: Tenant | None,
        services: Sequence[Service],
        session: Session,
        *,
        engines_sleep: bool,
        engines_asleep: bool,
        patience: float,
    ):
        """`patience`: seconds that an engine may take to go to sleep, or to wake."""
        super().__init__(actor.workers, services, session)
        self.actor, self.critic = actor, critic
        self.engines_sleep, self.engines_asleep, self.patience = engines_sleep, engines_asleep, patience

    def to_critic(self) -> None:
        assert self.critic is not None, "the run has no critic"
        self._engines_leave()
        self.actor.leave()
        self.critic.come()

    def to_train(self) -> None:
        self._engines_leave()
        if self.critic is not None:
            self.critic.leave()
        self.actor.come()

    def to_rollout(self, version: int) -> Metrics:
        """Hand over in an order that never holds both sides' all: an update needs weights on both, and nothing else."""
        self.to_train()
        metrics: Metrics = {}

        def exchange() -> None:
            self._wake("weights")
            metrics.update(publish(self.trainers, self.services, self.session, version))

        self.actor.leave(exchange)
        self._wake("kv_cache")
        self.engines_asleep = False
        return metrics

    def _engines_leave(self) -> None:
        if self.engines_sleep and not self.engines_asleep:
            calls = [service.call("sleep") for service in self.services]
            wait_for_engines(self.services, calls, doing="go to sleep", limit=self.patience)
            self.engines_asleep = True

    def _wake(self, tag: str) -> None:
        if self.engines_asleep:
            calls = [service.call("wake", [tag]) for service in self.services]
            wait_for_engines(self.services, calls, doing=f"wake its {tag}", limit=self.patience)


def publish(trainers: WorkerGroup, services: Sequence[Service], session: Session, version: int) -> Metrics:
    """Send the trainers' weights to every engine; they count as `version` only when all fingerprints agree."""
    updates = [service.call("update_weights", version) for service in services]
    for service, update in zip(services, updates, strict=True):
        update.add_done_callback(functools.partial(_abort_on_error, session, service.name))
    sent = [report for report in trainers.call("send_weights", version) if report is not None]
    reports = wait_for_all(
        services, updates, doing="take the new weights in", key="exchange.timeout", limit=session.timeout
    )
    if isinstance(session, ShardedSession):
        return _planned_metrics(sent, reports)
    compare_full_reports(sent[0], {service.name: report for service, report in zip(services, reports, strict=True)})
    return {"exchange/bytes": float(sent[0].bytes), "exchange/version": float(version)}


def _planned_metrics(sent: Sequence[ShardedReport], received: Sequence[ShardedReport]) -> Metrics:
    """Of a planned update that both sides agree on."""
    trainers, engines = merge_reports(sent), merge_reports(received)
    compare_sharded_reports(trainers, engines)
    phases = {phase: max(one.seconds.get(phase, 0.0) for one in (trainers, engines)) for phase in PHASES}
    return {
        "exchange/bytes": float(trainers.bytes),
        "exchange/version": float(trainers.version),
        "exchange/received_bytes": float(engines.bytes),
        "exchange/sent_bytes/max": float(max(one.bytes for one in sent)),
        **{f"exchange/seconds/{phase}": seconds for phase, seconds in phases.items()},
    }


def _abort_on_error(session: Session, name: str, done: Future[Any]) -> None:
    """An engine that fails in mid-update must not leave the trainers waiting for it."""
    error = done.exception()
    if error is not None:
        session.abort(f"engine {name}: {error}")


def wait_for_engines(
    services: Sequence[Service], calls: Sequence[Future[Any]], *, doing: str, limit: float
) -> list[Any]:
    """Results of a call to every engine that gets it ready, within `rollout.start_timeout` (`limit`)."""
    return wait_for_all(services, calls, doing=doing, key="rollout.start_timeout", limit=limit)
