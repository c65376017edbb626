"""Base class of the engine ranks' receivers."""

from __future__ import annotations

import atexit
import contextlib

from megarl.weight_sync.fingerprint import Fingerprinter
from megarl.weight_sync.heartbeat import HeartbeatClient
from megarl.weight_sync.incoming import IncomingBuckets
from megarl.weight_sync.session import Session, UpdateReport, WeightSyncError, done_key
from megarl.weight_sync.shared_memory import remove_stale_files
from megarl.weight_sync.store import StoreChannel


class Receiver:
    """Receives versions one after the other. Not thread-safe.

    On any error call `fail(reason)`, which ends the update on all ranks.
    """

    def __init__(self, session: Session, name: str) -> None:
        """`name`: of this receiver in `session.receivers`; ValueError if it is not there."""
        if name not in session.names:
            raise ValueError(f"receiver {name!r} is not part of this session; it has {sorted(session.names)}")
        remove_stale_files(session.shm_dir)  # of a killed relay, on a host without senders
        self.session, self.name, self.rank = session, name, session.names.index(name)
        self._channel = StoreChannel(session)
        self._incoming: IncomingBuckets | None = None  # once connected
        self._fingerprinter = Fingerprinter(on_device=session.stays_on_devices)
        self._updates = 0  # reported to the senders
        # Last: it has a thread and a connection.
        self._heartbeat = HeartbeatClient(self._channel, f"engine rank {name}")
        atexit.register(self.close)

    def _publish_report(self, report: UpdateReport) -> UpdateReport:
        """Report to the senders that the version is loaded."""
        self._channel.publish(done_key(self._updates, self.name), report.to_dict())
        if self._updates:  # senders have read the last report: they have sent another version
            self._channel.delete([done_key(self._updates - 1, self.name)])
        self._updates += 1
        self._heartbeat.end()
        return report

    def fail(self, reason: str) -> None:
        """Abort the update on all ranks: this receiver could not receive or load it."""
        with contextlib.suppress(WeightSyncError):  # raised only if the store is gone, and every rank detects that
            self._channel.abort(f"receiver {self.name!r}: {reason}")
        self._heartbeat.end()

    def close(self) -> None:
        """Leave the session and free the slots. May be called twice."""
        atexit.unregister(self.close)
        with contextlib.ExitStack() as closing:  # in reverse order, each even if another one raises
            if self._incoming is not None:
                closing.callback(self._incoming.close)
            closing.callback(self._fingerprinter.close)
            closing.callback(self._heartbeat.close)
