"""Base class of the trainers' senders. `send_or_abort` sends the weights of an update, `start_session` starts a session."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from megarl.cluster.failures import is_communication_error
from megarl.cluster.key_value_store import serve_store
from megarl.weight_sync.fingerprint import Fingerprinter
from megarl.weight_sync.heartbeat import HeartbeatClient, HeartbeatMonitor
from megarl.weight_sync.outgoing import OutgoingBuckets
from megarl.weight_sync.process_group import CAUSE_SECONDS
from megarl.weight_sync.session import (
    DEVICE_TRANSPORTS,
    SHARED_MEMORY_DIR,
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
    sharded: bool,
    bucket_bytes: int,
    timeout: float,
    heartbeat_timeout: float,
    device: str = "cpu",
    shm_dir: str = SHARED_MEMORY_DIR,
    check_every: int = 0,
    directory: str | None = None,
    adapter_alpha: float | None = None,
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
        sharded=sharded,
        transport=transport,
        bucket_bytes=bucket_bytes,
        timeout=timeout,
        heartbeat_timeout=heartbeat_timeout,
        shm_dir=shm_dir,
        device=device if transport in DEVICE_TRANSPORTS else "cpu",
        check_every=check_every,
        directory=directory,
        adapter_alpha=adapter_alpha,
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
            self._monitor: HeartbeatMonitor | None = None
            if store is not None:
                self._monitor = undo.enter_context(contextlib.closing(HeartbeatMonitor(session, self._channel)))
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
            self._abort(f"{type(error).__name__}: {error}")
            raise

    def _abort(self, cause: str) -> None:
        """Abort the session because this rank failed, unless the heartbeat monitor does with a better reason: a dead rank breaks
        the connections of the others."""
        with contextlib.suppress(WeightSyncError):  # the store is gone, which all ranks detect
            if not (is_communication_error(cause) and self._is_aborted_soon()):
                self._channel.abort(f"trainer {self._rank} failed: {cause}")

    def _is_aborted_soon(self) -> bool:
        """Return whether the session is aborted within `CAUSE_SECONDS`."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while self._channel.abort_reason() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _wait_until_loaded(self, sent: UpdateReport) -> None:
        """Wait until every engine rank that this rank sends to has loaded the version, and compare reports."""
        keys = [done_key(self._updates, self.session.names[target]) for target in self._targets]
        self._updates += 1
        values = self._channel.wait(keys, f"receivers to load version {sent.version}", longest_pause=LOAD_PAUSE)
        if values:
            received = merge_reports([UpdateReport(**report) for report in values])
            streams = {key: value for key, value in received.streams.items() if key in sent.streams}
            compare_reports(sent, dataclasses.replace(received, streams=streams))

    def close(self) -> None:
        """Leave the session and free the slots. May be called twice."""
        atexit.unregister(self.close)
        with contextlib.ExitStack() as closing:  # in reverse order, each even if another one raises
            if self._outgoing is not None:
                closing.callback(self._outgoing.close)
            closing.callback(self._fingerprinter.close)
            if self._monitor is not None:
                closing.callback(self._monitor.close)
            closing.callback(self._heartbeat.close)


class UpdatingRank(Protocol):
    """A trainer rank's part in updates: a `Sender` or an `ExportingRank`."""

    def send(self, version: int, export: Export) -> UpdateReport | None: ...

    def exports(self, version: int) -> bool: ...

    def close(self) -> None: ...


class ExportingRank:
    """A trainer rank that takes part in the collective export of a full session and sends nothing."""

    def send(self, version: int, export: Export) -> None:
        """Drain the export."""
        for _ in export():
            pass

    def exports(self, version: int) -> bool:
        """Return True: each full update is exported."""
        return True

    def close(self) -> None:
        """Do nothing."""


def send_or_abort(
    rank: UpdatingRank, version: int, export: Export, *, survive_abort: bool
) -> UpdateReport | AbortedUpdate | None:
    """Send as `Sender.send` does. survive_abort: if the update is aborted, return an AbortedUpdate instead of raising.

    The export is then drained: it is a collective, and other ranks may wait for this one.
    """
    exported: Iterator[tuple[str, torch.Tensor]] | None = None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal exported
        exported = iter(export())
        return exported

    try:
        return rank.send(version, tensors)
    except WeightSyncError as error:
        if not survive_abort:
            raise
        if rank.exports(version):
            for _ in exported if exported is not None else tensors():
                continue
        return AbortedUpdate(str(error))
