"""One weight update: engines receive while trainers send, then both sides' reports are compared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megarl.cluster.calls import wait_for_all
from megarl.types import Metrics
from megarl.weight_sync.session import PHASES, Session, UpdateReport, WeightSyncError, compare_reports, merge_reports


class SendingTrainers(Protocol):
    """The trainers' side of a weight sync."""

    def open_weight_sync(self, receivers: list[tuple[str, str]], route: str) -> Session | str:
        """Open a session for the `receivers` (name, host id). Returns the session, or the reason (str) against `route`."""

    def send_weights(self, version: int) -> list[UpdateReport]:
        """Send the weights. Returns the report of each rank that sent."""


class ReceivingEngine(Protocol):
    """An engine's side of a weight sync."""

    @property
    def name(self) -> str: ...

    def connect_weight_sync(self, session: Session) -> Future[str | None]:
        """Join a session; the result is the reason if the engine cannot."""

    def update_weights(self, version: int) -> Future[UpdateReport]:
        """Receive the weights of `version`; the result is the engine's report."""


def publish(trainers: SendingTrainers, engines: Sequence[ReceivingEngine], session: Session, version: int) -> Metrics:
    """Send the trainers' weights to every engine as `version`. Returns metrics of the update.

    Raises WeightSyncError unless all fingerprints agree.
    """
    updates = [engine.update_weights(version) for engine in engines]
    for engine, update in zip(engines, updates, strict=True):
        update.add_done_callback(functools.partial(_abort_on_error, session, engine.name))
    sent = trainers.send_weights(version)
    reports = wait_for_all(
        engines, updates, doing="take the new weights in", key="weight_sync.timeout", limit=session.timeout
    )
    return _metrics(sent, reports)


def _metrics(sent: Sequence[UpdateReport], received: Sequence[UpdateReport]) -> Metrics:
    """Compare both sides of an update and return its metrics."""
    trainers, engines = merge_reports(sent), merge_reports(received)
    compare_reports(trainers, engines)
    phases = {phase: max(side.seconds.get(phase, 0.0) for side in (trainers, engines)) for phase in PHASES}
    return {
        "weight_sync/bytes": float(trainers.bytes),
        "weight_sync/version": float(trainers.version),
        "weight_sync/received_bytes": float(engines.bytes),
        "weight_sync/sent_bytes/max": float(max(report.bytes for report in sent)),
        **{f"weight_sync/seconds/{phase}": seconds for phase, seconds in phases.items()},
    }


def _abort_on_error(session: Session, name: str, update: Future[Any]) -> None:
    """Abort the session if an engine fails during the update; otherwise the trainers would wait for it."""
    error = update.exception()
    if error is not None:
        with contextlib.suppress(
            WeightSyncError
        ):  # the trainers' rank 0 is gone: the call to the trainers fails with its death
            session.abort(f"engine {name}: {error}")
