"""A trainer rank's side of a planned exchange."""

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

from megarl.weight_sync.fingerprint import Fingerprint, Fingerprints, VersionFingerprint
from megarl.weight_sync.heartbeat import HeartbeatClient, HeartbeatMonitor
from megarl.weight_sync.process_group import CAUSE_SECONDS
from megarl.weight_sync.relay import Peer, of_holder
from megarl.weight_sync.session import (
    DEVICE_TRANSPORTS,
    SHARED_MEMORY_DIR,
    ShardedReport,
    ShardedSession,
    WeightSyncError,
    abbreviate_names,
    compare_sharded_reports,
    merge_reports,
    resolve_transports,
    stream_key,
)
from megarl.weight_sync.sharded import manifest
from megarl.weight_sync.sharded.buckets import Held, OutgoingBuckets, form_links
from megarl.weight_sync.sharded.copy import Boxes
from megarl.weight_sync.sharded.plan import Hosts, plan_transfers
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.sharded.verify import differing, expected
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
    """Start a session, in the process of the trainers' rank 0: what everyone needs to take part, and its key-value store.

    `host`: this machine's address as all others reach it. `senders`: `host_id` of every trainer rank. `receivers`: (name,
    `host_id`) of every engine rank. `device`: the kind that all of them compute on, of which the transports "device" and "ipc" make use.
    Raises ValueError where the transport cannot reach a receiver.
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
    """A bucket that is told of when its fingerprint is known."""

    stream: int
    bucket: int
    held: Held
    fingerprint: Fingerprint


class ShardedSender:
    """Sends this rank's streams of every version. Every trainer rank has one. Not thread-safe.

    After an error the session is dead: close this sender and meet again.
    """

    def __init__(
        self,
        session: ShardedSession,
        rank: int,
        held: SliceTable,
        tensors: Callable[[], Sequence[torch.Tensor]],
        store: Any = None,
    ) -> None:
        """`held`: what this rank holds; `tensors` gives its parameters as they are now, in the order of `held`. `store`: the
        session's, in the process that serves it."""
        remove_stale_files(session.shm_dir)
        self.session = session
        self._rank, self._held, self._tensors = rank, held, tensors
        self._channel = StoreChannel(session, store)
        self._boxes: dict[int, Boxes] | None = None  # by stream, once all is planned
        self._outbox: OutgoingBuckets | None = None
        self._fingerprints = Fingerprints(on_device=session.stays_on_devices)
        self._first: int | None = None  # version that was sent first
        with contextlib.ExitStack() as undo:  # a thread and a connection each, should a later part fail
            vigil = None if store is None else HeartbeatMonitor(session, self._channel)
            self._vigil = vigil and undo.enter_context(contextlib.closing(vigil))
            self._pulse = undo.enter_context(contextlib.closing(HeartbeatClient(self._channel, f"trainer {rank}")))
            manifest.tell(self._channel, manifest.holder(rank), held)
            undo.pop_all()
        atexit.register(self.close)

    def send(self, version: int, export: Export) -> ShardedReport:
        """Send what engines need of this rank as `version`; returns when they have loaded it. Collective over the
        trainer's ranks where the update is checked: `export` is then called, and all of it taken.

        No parameter may change meanwhile. Raises WeightSyncError where an engine failed, fell silent or got other bytes,
        or holds other values than those exported; OSError where /dev/shm is full.
        """
        try:
            with self._pulse.update(version):
                return self._send(version, export)
        except BaseException as error:
            with contextlib.suppress(WeightSyncError):  # the session is aborted already, or its own store is broken
                if isinstance(error, RuntimeError) and "onnection" in str(error):
                    self._leave_time_for_the_cause()
                self._channel.abort(f"trainer {self._rank} failed: {type(error).__name__}: {error}")
            raise

    def _leave_time_for_the_cause(self) -> None:
        """Of a trainers' group that broke, the watch over ranks tells who died. Raises WeightSyncError once it has."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline:
            self._channel.raise_if_aborted()
            time.sleep(0.02)

    def _send(self, version: int, export: Export) -> ShardedReport:
        self._channel.raise_if_aborted()
        seconds = dict.fromkeys(("pack", "fingerprint", "wait", "check"), 0.0)
        boxes = self._plan() if self._boxes is None else self._boxes
        assert self._outbox is not None
        self._first = version if self._first is None else self._first
        totals = {number: VersionFingerprint() for number in boxes}
        nbytes = buckets = 0
        tensors = self._tensors()
        assert all(tensor.is_contiguous() for tensor in tensors), "boxes are places in memory"
        last: _Packed | None = None
        for number, bucket in _in_turns(boxes):
            times = [time.perf_counter()]
            size = boxes[number].nbytes(bucket)
            held = self._outbox.claim(size)
            times.append(time.perf_counter())
            found = boxes[number].pack(bucket, held.memory, tensors.__getitem__, self._fingerprints)
            if self._hops[number].remote is not None:
                held.copy_to_network()
            times.append(time.perf_counter())
            self._tell(version, last, totals)
            last = _Packed(number, bucket, held, found)
            times.append(time.perf_counter())
            for phase, begin, end in zip(("wait", "pack", "fingerprint"), times[:-1], times[1:], strict=True):
                seconds[phase] += end - begin
            nbytes, buckets = nbytes + size, buckets + 1
        start = time.perf_counter()
        self._tell(version, last, totals)
        seconds["fingerprint"] += time.perf_counter() - start
        start = time.perf_counter()
        self._outbox.drain()
        drained = time.perf_counter()
        checked = self._check(version, export) if self.session.checked(version, self._first) else 0
        seconds["wait"] += drained - start
        seconds["check"] = time.perf_counter() - drained
        names = self.session.names
        streams = {
            stream_key(number, names[target]): totals[number].hexdigest()
            for number, one in boxes.items()
            for target in one.stream.targets
        }
        report = ShardedReport(version, streams, nbytes, buckets, checked, seconds)
        self._await_loaded(report)
        return report

    def _tell(self, version: int, packed: _Packed | None, totals: dict[int, VersionFingerprint]) -> None:
        """Announce a bucket, once its fingerprint is known."""
        if packed is None:
            return
        assert self._outbox is not None
        number, bucket, value = packed.stream, packed.bucket, packed.fingerprint.result()
        header = {"version": version, "stream": number, "bucket": bucket, "fingerprint": value}
        self._outbox.send(packed.held, self._hops[number], header, self._what(number, bucket))
        totals[number].add(str(bucket), value)

    def _plan(self) -> dict[int, Boxes]:
        """Once, when all engine ranks have said what they need."""
        session, channel = self.session, self._channel
        ranks = range(len(session.senders))
        held = manifest.hear(channel, [manifest.holder(rank) for rank in ranks], "the trainers' descriptions")
        self._needed = manifest.hear(
            channel, [manifest.needing(name) for name in session.names], "the engines to say what they need"
        )
        manifest.agree(channel, session, held, self._needed, first=self._rank == 0)
        hosts = Hosts(session.senders, [host for _, host in session.receivers])
        streams = plan_transfers(held, self._needed, hosts, session.bucket_bytes).streams_from(self._rank)
        own: Peer = ("trainer", self._rank)
        self._hops = of_holder(own, streams, session)
        boxes = {one.number: Boxes(one) for one in streams}
        largest = max((one.largest for one in boxes.values()), default=0)
        self._outbox = OutgoingBuckets(channel, session, own, self._hops.values(), largest)
        self._outbox.connect(form_links(channel, session, own, self._hops.values()))
        self._boxes = boxes
        return boxes

    def _what(self, stream: int, bucket: int) -> str:
        assert self._boxes is not None
        names = abbreviate_names(self._boxes[stream].names(bucket, self._held.tensors))
        return f"bucket {bucket} of stream {stream} from trainer {self._rank} ({names})"

    def _check(self, version: int, export: Export) -> int:
        """Compare what engine ranks loaded with the export, each engine rank in one trainer rank. Returns how many boxes
        were compared here."""
        mine = range(self._rank, len(self.session.receivers), len(self.session.senders))
        needs = [self._needed[rank] for rank in mine]
        wanted = expected(export(), needs)
        for rank, need, own in zip(mine, needs, wanted, strict=True):
            name = self.session.names[rank]
            key = f"examined/{version}/{name}"
            (found,) = self._channel.wait([key], f"receiver {name!r} to say what it loaded")
            self._channel.delete([key])
            self._channel.publish(f"verdict/{version}/{name}", differing(need, found, own))
        return sum(len(one) for one in wanted)

    def _await_loaded(self, sent: ShardedReport) -> None:
        """Until every engine rank that this rank sends to has loaded the version, and the same one."""
        assert self._boxes is not None
        targets = sorted({target for one in self._boxes.values() for target in one.stream.targets})
        names = [self.session.names[target] for target in targets]
        keys = [f"done/{sent.version}/{name}" for name in names]
        loaded = [ShardedReport(**one) for one in self._channel.wait(keys, f"receivers to load version {sent.version}")]
        if loaded:
            received = merge_reports(loaded)
            own = {key: value for key, value in received.streams.items() if key in sent.streams}
            compare_sharded_reports(sent, ShardedReport(**{**received.to_dict(), "streams": own}))

    def close(self) -> None:
        """Give the slots' memory back. May be called twice."""
        atexit.unregister(self.close)
        self._pulse.close()
        if self._vigil is not None:
            self._vigil.close()
        self._fingerprints.close()
        if self._outbox is not None:
            self._outbox.close()


def _in_turns(boxes: dict[int, Boxes]) -> Iterator[tuple[int, int]]:
    """(stream, bucket): a bucket of each stream, then the next of each, so that all engine ranks have work."""
    longest = max((len(one.stream.buckets) for one in boxes.values()), default=0)
    for bucket in range(longest):
        for number, one in boxes.items():
            if bucket < len(one.stream.buckets):
                yield number, bucket
