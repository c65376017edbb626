"""Base class of the trainers' senders. `send_or_abort` sends the weights of an update, `start_session` starts a session."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from megarl.cluster.key_value_store import serve_store
from megarl.weight_sync.fingerprint import Fingerprinter
from megarl.weight_sync.heartbeat import HeartbeatClient, HeartbeatMonitor
from megarl.weight_sync.outgoing import OutgoingBuckets
from megarl.weight_sync.process_group import CAUSE_SECONDS
from megarl.weight_sync.session import (
    DEVICE_TRANSPORTS,
    AbortedUpdate,
    Session,
    UpdateReport,
    WeightSyncError,
    check_transport,
    compare_reports,
    done_key,
    merge_reports,
)
from megarl.weight_sync.shared_memory import remove_stale_files
from megarl.weight_sync.store import LOAD_PAUSE, StoreChannel

Export = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def start_session(
    host: str,
    senders: Sequence[str],
    receivers: Sequence[tuple[str, str]],
    *,
    transport: str,
    timeout: float,
    device: str = "cpu",
    **settings: Any,
) -> tuple[Session, Any]:
    """Start a session and its key-value store. Call it in the process of the trainers' rank 0.

    `host`: this machine's address as the others reach it. `device`: device kind of all ranks, for the transports "device" and
    "ipc". Other arguments: see `Session`. Raises ValueError if the transport cannot reach a receiver.
    """
    check_transport(transport, senders, receivers)
    store = serve_store(host, timedelta(seconds=timeout))
    session = Session(
        host=host,
        port=store.port,
        prefix=uuid.uuid4().hex,
        secret=secrets.token_hex(32),
        senders=tuple(senders),
        receivers=tuple(receivers),
        transport=transport,
        timeout=timeout,
        device=device if transport in DEVICE_TRANSPORTS else "cpu",
        **settings,
    )
    return session, store


class Sender(ABC):
    """Sends one version after the other. Not thread-safe.

    After an error the session is unusable: close this sender and open a new session.
    """

    def __init__(self, session: Session, rank: int, store: Any = None) -> None:
        """`store`: the session's store, in the process that serves it."""
        remove_stale_files(session.shm_dir)
        self.session, self._rank = session, rank
        self._channel = StoreChannel(session, store)
        self._outgoing: OutgoingBuckets | None = None  # once connected
        self._updates = 0  # sent
        self._targets: list[int] = []  # engine ranks that this rank sends to, once connected
        self._fingerprinter = Fingerprinter(on_device=session.stays_on_devices)
        with contextlib.ExitStack() as undo:  # close threads and connections if a later step fails
            monitor = None if store is None else HeartbeatMonitor(session, self._channel)
            self._monitor = monitor and undo.enter_context(contextlib.closing(monitor))
            self._heartbeat = undo.enter_context(contextlib.closing(HeartbeatClient(self._channel, f"trainer {rank}")))
            self._join()
            undo.pop_all()
        atexit.register(self.close)

    def _join(self) -> None:
        """Prepare the first update, before receivers connect."""

    @abstractmethod
    def _send(self, version: int, export: Export) -> UpdateReport:
        """Connect in the first update, then send every bucket of `version` and wait until it has been read."""

    def exports(self, version: int) -> bool:
        """Return whether every rank exports in the update to `version`."""
        return True

    def send(self, version: int, export: Export) -> UpdateReport:
        """Send `version`, and wait until the engine ranks that this rank sends to have loaded it.

        `export` returns every weight as (name, tensor). No parameter may change meanwhile. Raises WeightSyncError if an engine
        failed, stopped, got other bytes or loaded other values; OSError if /dev/shm is full.
        """
        try:
            with self._heartbeat.update(version):
                self._channel.raise_if_aborted()
                report = self._send(version, export)
                self._wait_until_loaded(report)
                return report
        except BaseException as error:
            with contextlib.suppress(WeightSyncError):  # the session is aborted already, or its store is gone
                if isinstance(error, RuntimeError) and "onnection" in str(error):
                    self._wait_for_cause()
                self._channel.abort(f"trainer {self._rank} failed: {type(error).__name__}: {error}")
            raise

    def _wait_for_cause(self) -> None:
        """Give the heartbeat monitor time to name the dead rank that broke the trainers' process group.

        Raises WeightSyncError once the session is aborted.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline:
            self._channel.raise_if_aborted()
            time.sleep(0.02)

    def _wait_until_loaded(self, sent: UpdateReport) -> None:
        """Wait until every engine rank that this rank sends to has loaded the version, and compare reports."""
        keys = [done_key(self._updates, self.session.names[target]) for target in self._targets]
        self._updates += 1
        values = self._channel.wait(keys, f"receivers to load version {sent.version}", longest_pause=LOAD_PAUSE)
        if values:
            received = merge_reports([UpdateReport(**report) for report in values])
            streams = {key: value for key, value in received.streams.items() if key in sent.streams}
            compare_reports(sent, UpdateReport(**{**received.to_dict(), "streams": streams}))

    def close(self) -> None:
        """Free the slots and leave the session. May be called twice."""
        atexit.unregister(self.close)
        self._heartbeat.close()
        if self._monitor is not None:
            self._monitor.close()
        self._fingerprinter.close()
        if self._outgoing is not None:
            self._outgoing.close()


class ExportingRank:
    """A trainer rank that takes part in the collective export of a full session and sends nothing."""

    session = None

    def send(self, version: int, export: Export) -> None:
        """Drain the export."""
        for _ in export():
            pass

    def close(self) -> None:
        """Do nothing."""


def send_or_abort(
    sender: Sender | ExportingRank, version: int, export: Export, goes_on: bool
) -> UpdateReport | AbortedUpdate | None:
    """Send as `Sender.send` does. goes_on: if the update is aborted, return why; the trainers go on (`rollout.min_engines`).

    The export is then drained: it is a collective, and other ranks may wait for this one.
    """
    exports: list[Iterator[tuple[str, torch.Tensor]]] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        exports.append(iter(export()))
        return exports[-1]

    try:
        return sender.send(version, tensors)
    except WeightSyncError as error:
        if not goes_on:
            raise
        assert isinstance(sender, Sender), "a rank that only exports takes no part in the session"
        if sender.exports(version):
            for _ in exports[-1] if exports else tensors():
                continue
        return AbortedUpdate(str(error))
