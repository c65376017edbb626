"""A trainer rank's side of sharded weight sync."""

from __future__ import annotations

import atexit
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.weight_sync.fingerprint import Fingerprint, Fingerprinter, VersionFingerprint
from megarl.weight_sync.heartbeat import HeartbeatClient, HeartbeatMonitor
from megarl.weight_sync.process_group import CAUSE_SECONDS
from megarl.weight_sync.relay import Peer, relays_from
from megarl.weight_sync.session import (
    DEVICE_TRANSPORTS,
    SHARED_MEMORY_DIR,
    ShardedReport,
    ShardedSession,
    WeightSyncError,
    compare_sharded_reports,
    merge_reports,
    resolve_transports,
    stream_key,
)
from megarl.weight_sync.sharded import manifest
from megarl.weight_sync.sharded.buckets import BucketMemory, OutgoingBuckets, form_links
from megarl.weight_sync.sharded.copy import StreamCopier
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.sharded.verify import differing_tensors, expected_fingerprints
from megarl.weight_sync.shared_memory import remove_stale_files
from megarl.weight_sync.store import StoreChannel

Export = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def open_sharded_session(
    host: str,
    senders: Sequence[str],
    receivers: Sequence[tuple[str, str]],
    *,
    transport: str,
    bucket_bytes: int,
    timeout: float,
    check_every: int,
    heartbeat_timeout: float,
    device: str = "cpu",
    shm_dir: str = SHARED_MEMORY_DIR,
) -> tuple[ShardedSession, Any]:
    """Start a session and its key-value store. Call it in the process of the trainers' rank 0.

    `host`: this machine's address as the others reach it. `senders`: `host_id` of every trainer rank. `receivers`: (name,
    `host_id`) of every engine rank. `device`: device kind of all ranks, for the transports "device" and "ipc". Other
    arguments: see `ShardedSession`. Raises ValueError if the transport cannot reach a receiver.
    """
    for sender in set(senders):
        resolve_transports(transport, sender, receivers)
    store = dist.TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    session = ShardedSession(
        host=host,
        port=store.port,
        prefix=uuid.uuid4().hex,
        receivers=tuple(receivers),
        bucket_bytes=bucket_bytes,
        timeout=timeout,
        shm_dir=shm_dir,
        senders=tuple(senders),
        transport=transport,
        check_every=check_every,
        heartbeat_timeout=heartbeat_timeout,
        device=device if transport in DEVICE_TRANSPORTS else "cpu",
    )
    return session, store


@dataclass
class _Packed:
    """A packed bucket, not yet announced: its fingerprint is being computed."""

    stream: int
    bucket: int
    memory: BucketMemory
    fingerprint: Fingerprint


class ShardedSender:
    """Sends this rank's streams of every version. Every trainer rank has one. Not thread-safe.

    After an error the session is unusable: close this sender and open a new session.
    """

    def __init__(
        self,
        session: ShardedSession,
        rank: int,
        held: SliceTable,
        tensors: Callable[[], Sequence[torch.Tensor]],
        store: Any = None,
    ) -> None:
        """`held`: this rank's slice table. `tensors` returns its parameters' current values, in the order of `held`.

        `store`: the session's store, in the process that serves it.
        """
        remove_stale_files(session.shm_dir)
        self.session = session
        self._rank, self._held, self._tensors = rank, held, tensors
        self._channel = StoreChannel(session, store)
        self._copiers: dict[int, StreamCopier] | None = None  # by stream, once planned
        self._outgoing: OutgoingBuckets | None = None
        self._fingerprinter = Fingerprinter(on_device=session.stays_on_devices)
        self._first: int | None = None  # the first version sent
        with contextlib.ExitStack() as undo:  # close threads and connections if a later step fails
            monitor = None if store is None else HeartbeatMonitor(session, self._channel)
            self._monitor = monitor and undo.enter_context(contextlib.closing(monitor))
            self._heartbeat = undo.enter_context(contextlib.closing(HeartbeatClient(self._channel, f"trainer {rank}")))
            manifest.publish(self._channel, manifest.held_key(rank), held)
            undo.pop_all()
        atexit.register(self.close)

    def send(self, version: int, export: Export) -> ShardedReport:
        """Send the slices that engines need from this rank as `version`, and wait until they are loaded.

        If the update is checked, this call is collective over the trainer's ranks: it calls `export` and drains it. No
        parameter may change meanwhile. Raises WeightSyncError if an engine failed, stopped, got other bytes or loaded other
        values than those exported; OSError if /dev/shm is full.
        """
        try:
            with self._heartbeat.update(version):
                return self._send(version, export)
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

    def _send(self, version: int, export: Export) -> ShardedReport:
        self._channel.raise_if_aborted()
        seconds = dict.fromkeys(("pack", "fingerprint", "wait", "check"), 0.0)
        copiers = self._plan() if self._copiers is None else self._copiers
        assert self._outgoing is not None
        self._first = version if self._first is None else self._first
        totals = {number: VersionFingerprint() for number in copiers}
        nbytes = buckets = 0
        tensors = self._tensors()
        assert all(tensor.is_contiguous() for tensor in tensors), "slices are locations in contiguous memory"
        last: _Packed | None = None
        for number, bucket in _interleaved(copiers):
            times = [time.perf_counter()]
            size = copiers[number].nbytes(bucket)
            memory = self._outgoing.claim(size)
            times.append(time.perf_counter())
            fingerprint = copiers[number].pack(bucket, memory.memory, tensors.__getitem__, self._fingerprinter)
            if self._relays[number].remote is not None:
                memory.copy_to_network()
            times.append(time.perf_counter())
            self._announce(version, last, totals)
            last = _Packed(number, bucket, memory, fingerprint)
            times.append(time.perf_counter())
            for phase, begin, end in zip(("wait", "pack", "fingerprint"), times[:-1], times[1:], strict=True):
                seconds[phase] += end - begin
            nbytes, buckets = nbytes + size, buckets + 1
        start = time.perf_counter()
        self._announce(version, last, totals)
        seconds["fingerprint"] += time.perf_counter() - start
        start = time.perf_counter()
        self._outgoing.drain()
        drained = time.perf_counter()
        checked = self._check(version, export) if self.session.is_checked(version, self._first) else 0
        seconds["wait"] += drained - start
        seconds["check"] = time.perf_counter() - drained
        names = self.session.names
        streams = {
            stream_key(number, names[target]): totals[number].hexdigest()
            for number, copier in copiers.items()
            for target in copier.stream.targets
        }
        report = ShardedReport(version, streams, nbytes, buckets, checked, seconds)
        self._wait_until_loaded(report)
        return report

    def _announce(self, version: int, packed: _Packed | None, totals: dict[int, VersionFingerprint]) -> None:
        """Send a packed bucket to its readers, once its fingerprint is computed."""
        if packed is None:
            return
        assert self._outgoing is not None and self._copiers is not None
        number, bucket, value = packed.stream, packed.bucket, packed.fingerprint.result()
        header = {"version": version, "stream": number, "bucket": bucket, "fingerprint": value}
        description = self._copiers[number].describe(bucket, self._held.tensors)
        self._outgoing.send(packed.memory, self._relays[number], header, description)
        totals[number].add(str(bucket), value)

    def _plan(self) -> dict[int, StreamCopier]:
        """Plan and connect, once, after all engine ranks have published their slice tables."""
        session, channel = self.session, self._channel
        ranks = range(len(session.senders))
        held = manifest.collect(channel, [manifest.held_key(rank) for rank in ranks], "the trainers' slice tables")
        plan, self._needed = manifest.plan_update(channel, session, held, first=self._rank == 0)
        streams = plan.streams_from(self._rank)
        peer: Peer = ("trainer", self._rank)
        self._relays = relays_from(peer, streams, session)
        copiers = {stream.number: StreamCopier(stream) for stream in streams}
        largest = max((copier.largest for copier in copiers.values()), default=0)
        self._outgoing = OutgoingBuckets(channel, session, peer, self._relays.values(), largest)
        self._outgoing.connect(form_links(channel, session, peer, self._relays.values()))
        self._copiers = copiers
        return copiers

    def _check(self, version: int, export: Export) -> int:
        """Compare the weights that engine ranks loaded with the export. Returns the number of slices compared here.

        Trainer ranks divide the engine ranks among them.
        """
        ranks = range(self._rank, len(self.session.receivers), len(self.session.senders))
        tables = [self._needed[rank] for rank in ranks]
        all_expected = expected_fingerprints(export(), tables)
        for rank, table, expected in zip(ranks, tables, all_expected, strict=True):
            name = self.session.names[rank]
            key = f"loaded/{version}/{name}"
            (loaded,) = self._channel.wait([key], f"receiver {name!r} to publish the fingerprints of its weights")
            self._channel.delete([key])
            self._channel.publish(f"verdict/{version}/{name}", differing_tensors(table, loaded, expected))
        return sum(len(expected) for expected in all_expected)

    def _wait_until_loaded(self, sent: ShardedReport) -> None:
        """Wait until every engine rank that this rank sends to has loaded the version, and compare reports."""
        assert self._copiers is not None
        targets = sorted({target for copier in self._copiers.values() for target in copier.stream.targets})
        names = [self.session.names[target] for target in targets]
        keys = [f"done/{sent.version}/{name}" for name in names]
        values = self._channel.wait(keys, f"receivers to load version {sent.version}")
        if values:
            received = merge_reports([ShardedReport(**report) for report in values])
            streams = {key: value for key, value in received.streams.items() if key in sent.streams}
            compare_sharded_reports(sent, ShardedReport(**{**received.to_dict(), "streams": streams}))

    def close(self) -> None:
        """Free the slots and leave the session. May be called twice."""
        atexit.unregister(self.close)
        self._heartbeat.close()
        if self._monitor is not None:
            self._monitor.close()
        self._fingerprinter.close()
        if self._outgoing is not None:
            self._outgoing.close()


def _interleaved(copiers: dict[int, StreamCopier]) -> Iterator[tuple[int, int]]:
    """Yield (stream, bucket): the first bucket of each stream, then the second of each, so that all engine ranks have work."""
    longest = max((len(copier.stream.buckets) for copier in copiers.values()), default=0)
    for bucket in range(longest):
        for number, copier in copiers.items():
            if bucket < len(copier.stream.buckets):
                yield number, bucket
