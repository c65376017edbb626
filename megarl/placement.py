"""Who holds the devices when, and how new weights reach the engines.

The loop says `to_train` and `to_rollout`; whether engines share the trainers' devices, have their own,
or do not exist (SFT) is said here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megarl.cluster.base import Service, WorkerGroup
from megarl.exchange.session import ExchangeSession, compare_reports
from megarl.types import Metrics


class Placement(Protocol):
    def to_train(self) -> None:
        """The trainers compute next."""

    def to_rollout(self, version: int) -> Metrics:
        """The engines sample next, with the trainers' weights as `version`. Returns what the exchange cost."""


class TrainersOnly:
    """No engines: nothing to hand over."""

    def to_train(self) -> None: ...

    def to_rollout(self, version: int) -> Metrics:
        return {}


class Disaggregated:
    """Engines have devices of their own and stay awake."""

    def __init__(self, trainers: WorkerGroup, services: Sequence[Service], session: ExchangeSession):
        self.trainers, self.services, self.session = trainers, list(services), session

    def to_train(self) -> None: ...

    def to_rollout(self, version: int) -> Metrics:
        return publish(self.trainers, self.services, self.session, version)


class Colocated(Disaggregated):
    """Engines and trainers take turns on the same devices: one sleeps while the other computes."""

    def __init__(
        self,
        trainers: WorkerGroup,
        services: Sequence[Service],
        session: ExchangeSession,
        *,
        engines_sleep: bool,
        trainers_offload: bool,
        engines_asleep: bool,
    ):
        super().__init__(trainers, services, session)
        self.engines_sleep, self.trainers_offload = engines_sleep, trainers_offload
        self.engines_asleep = engines_asleep

    def to_train(self) -> None:
        if self.engines_sleep and not self.engines_asleep:
            _all([service.call("sleep") for service in self.services])
            self.engines_asleep = True
        if self.trainers_offload:
            self.trainers.call("onload")

    def to_rollout(self, version: int) -> Metrics:
        """Hand over in an order that never holds both sides' all: an update needs weights on both, and nothing else."""
        if self.trainers_offload:
            self.trainers.call("offload_optimizer")
        self._wake("weights")
        metrics = super().to_rollout(version)
        if self.trainers_offload:
            self.trainers.call("offload_weights")
        self._wake("kv_cache")
        self.engines_asleep = False
        return metrics

    def _wake(self, tag: str) -> None:
        if self.engines_asleep:
            _all([service.call("wake", [tag]) for service in self.services])


def publish(trainers: WorkerGroup, services: Sequence[Service], session: ExchangeSession, version: int) -> Metrics:
    """Send the trainers' weights to every engine; they count as `version` only when all fingerprints agree."""
    updates = [service.call("update_weights", version) for service in services]
    for service, update in zip(services, updates, strict=True):
        update.add_done_callback(functools.partial(_abort_on_error, session, service.name))
    sent = trainers.call("send_weights", version)[0]
    received = dict(zip([service.name for service in services], _all(updates), strict=True))
    compare_reports(sent, received)
    return {"exchange/bytes": float(sent.bytes), "exchange/version": float(version)}


def _abort_on_error(session: ExchangeSession, name: str, done: Future[Any]) -> None:
    """An engine that fails in mid-update must not leave the trainers waiting for it."""
    error = done.exception()
    if error is not None:
        session.abort(f"engine {name}: {error}")


def _all(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]
