"""An engine rank's side of sharded weight sync."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megarl.platform import select
from megarl.weight_sync.fingerprint import Fingerprint, Fingerprinter, VersionFingerprint
from megarl.weight_sync.heartbeat import HeartbeatClient
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Peer, Relay, peer_name, relays_from, stream_relays
from megarl.weight_sync.session import (
    RECEIVE_AHEAD,
    ShardedReport,
    ShardedSession,
    WeightSyncError,
    stream_key,
)
from megarl.weight_sync.sharded import manifest
from megarl.weight_sync.sharded.buckets import BucketMemory, OutgoingBuckets, form_links, handles_key, mapped_key
from megarl.weight_sync.sharded.copy import StreamCopier
from megarl.weight_sync.sharded.mailbox import AckWriter, Mailbox
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.sharded.verify import SliceFingerprints
from megarl.weight_sync.shared_memory import MappedSlots
from megarl.weight_sync.store import StoreChannel

CompletedHook = Callable[[Iterable[int], Callable[[int], torch.Tensor]], None]
"""Called with the numbers of complete parameters and a function that returns a parameter's memory."""


class SliceTarget(Protocol):
    """The parameters into which an engine rank's slices are copied."""

    def tensor(self, parameter: int) -> torch.Tensor:
        """Return the memory of a parameter of the rank's slice table, to be written to."""
        ...

    def mark_written(self, parameter: int, elements: int) -> None:
        """Record that `elements` more elements of this parameter have been written."""
        ...


@dataclass
class _Incoming:
    """An announced bucket, which may still be in transfer."""

    header: dict[str, Any]
    holder: Peer
    memory: torch.Tensor  # uint8
    relayed: BucketMemory | None  # holds `memory` if this rank passes the bucket on
    broadcast: Any  # the running network transfer, or None
    group: BroadcastGroup | None


class ShardedReceiver:
    """Receives versions one after the other. Not thread-safe.

    First call `collect_held` and `publish_needed`. For each version call `begin`, `receive`, finish loading in the engine,
    then `finish`. On any error call `fail(reason)`, which ends the update on all ranks.
    """

    def __init__(self, session: ShardedSession, name: str) -> None:
        """`name`: of this receiver in `session.receivers`; ValueError if it is not there."""
        if name not in session.names:
            raise ValueError(f"receiver {name!r} is not part of this session; it has {sorted(session.names)}")
        self.name, self.rank = name, session.names.index(name)
        self._session = session
        self._channel = StoreChannel(session)
        self._slots = MappedSlots(session.shm_dir)
        # Explicit for every allocation: vLLM changes torch's default device around a receiver.
        self._device = select(session.network_device).device()
        self._platform = select(session.device)
        self._memories: dict[tuple[Peer, int], torch.Tensor] = {}
        self._held: list[SliceTable] = []
        self._needed: SliceTable | None = None
        self._copiers: dict[int, StreamCopier] | None = None  # by stream, once planned
        self._outgoing: OutgoingBuckets | None = None
        self._first: int | None = None  # the first version received
        self._fingerprinter = Fingerprinter(on_device=session.stays_on_devices)
        self._loaded_key: str | None = None  # of the last published report
        self._heartbeat = HeartbeatClient(
            self._channel, f"engine rank {name}"
        )  # last: it has a thread and a connection

    def collect_held(self) -> list[SliceTable]:
        """Wait for the slice tables of all trainer ranks and return them in the order of ranks."""
        ranks = range(len(self._session.senders))
        self._held = manifest.collect(
            self._channel, [manifest.held_key(rank) for rank in ranks], "the trainers' slice tables"
        )
        return self._held

    def publish_needed(self, needed: SliceTable) -> None:
        """Publish the slices that this rank needs. Call after `collect_held`."""
        self._needed = needed
        manifest.publish(self._channel, manifest.needed_key(self.name), needed)

    def _plan(self) -> dict[int, StreamCopier]:
        """Plan and connect, once, after all engine ranks have published their slice tables."""
        session, channel = self._session, self._channel
        plan, _ = manifest.plan_update(channel, session, self._held, first=False)
        streams = plan.streams_to(self.rank)
        copiers = {stream.number: StreamCopier(stream) for stream in streams}
        incoming = [
            relay for stream in streams for relay in stream_relays(stream, session) if self.rank in relay.readers
        ]
        self._mailbox = Mailbox(channel, self.rank, len({relay.holder for relay in incoming}))
        self._acks = AckWriter(channel, self.rank)
        self._peer: Peer = ("engine", self.rank)
        self._onward: dict[int, Relay] = relays_from(self._peer, streams, session)
        largest = max((copier.largest for copier in copiers.values()), default=0)
        self._outgoing = OutgoingBuckets(channel, session, self._peer, self._onward.values(), largest)
        for holder in sorted({relay.holder for relay in incoming if self.rank in relay.local}):
            self._map(holder)
        self._links = form_links(channel, session, self._peer, [*incoming, *self._onward.values()])
        self._outgoing.connect(self._links)
        self._copiers = copiers
        return copiers

    def _map(self, holder: Peer) -> None:
        name = peer_name(holder, self._session.names)
        (handles,) = self._channel.wait([handles_key(holder, self.rank)], f"{name} to share its memory")
        for slot, handle in enumerate(handles):
            self._memories[holder, slot] = self._open((holder, slot), handle, name)
        self._channel.publish(mapped_key(holder, self.rank), True)

    def _open(self, slot: tuple[Peer, int], handle: Any, holder: str) -> torch.Tensor:
        if not self._session.stays_on_devices:
            return self._slots.memory(slot, handle)
        try:
            return self._platform.open_shared(handle)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"receiver {self.name!r} cannot map the device memory of {holder} ({error}). Devices must reach each other, and "
                "containers must share IPC and PID namespaces (docker run --ipc=host --pid=host); weight_sync.transport=auto "
                "goes through host memory"
            ) from error

    def begin(self, version: int) -> CompletedHook | None:
        """Start the update to `version`.

        Returns a hook if the update is compared with the trainers' export: pass it each parameter once the parameter is
        complete and before it is post-processed. Otherwise returns None.
        """
        assert self._needed is not None, "call publish_needed first"
        self._heartbeat.begin(version)
        self._version = version
        self._seconds = dict.fromkeys(("wait", "fingerprint", "load", "check"), 0.0)
        copiers = self._plan() if self._copiers is None else self._copiers
        self._first = version if self._first is None else self._first
        self._check = SliceFingerprints(self._needed) if self._session.is_checked(version, self._first) else None
        self._totals = {number: VersionFingerprint() for number in copiers}
        self._bytes = self._buckets = 0
        self._remaining = {number: len(copier.stream.buckets) for number, copier in copiers.items()}
        return None if self._check is None else self._check.add

    def receive(self, target: SliceTarget) -> None:
        """Copy every bucket into `target`.

        Raises WeightSyncError for a wrong version, changed bytes, an abort, or a sender that died or stopped.
        """
        incoming: list[_Incoming] = []
        expected, announced = sum(self._remaining.values()), 0
        while self._buckets < expected:
            while announced < expected and len(incoming) < RECEIVE_AHEAD:
                header = self._mailbox.poll() if incoming else self._wait_for_notice()
                if header is None:
                    break
                incoming.append(self._start(header))
                announced += 1
            self._load(incoming.pop(0), target)
        self._received = time.perf_counter()

    def _wait_for_notice(self) -> dict[str, Any]:
        """Wait for the notice of the next bucket from any holder."""
        assert self._copiers is not None
        start = time.perf_counter()
        sources = sorted({self._copiers[number].stream.source for number, left in self._remaining.items() if left})
        header = self._mailbox.wait(f"{self.name}: a bucket from trainers {sources}")
        self._seconds["wait"] += time.perf_counter() - start
        return header

    def _start(self, header: dict[str, Any]) -> _Incoming:
        """Find the memory of an announced bucket, or start its network transfer."""
        assert self._copiers is not None
        if header["version"] != self._version:
            raise WeightSyncError(f"receiver {self.name!r} expects version {self._version}, got {header['version']}")
        holder: Peer = (header["holder"][0], header["holder"][1])
        stream, bucket = header["stream"], header["bucket"]
        nbytes = self._copiers[stream].nbytes(bucket)
        if header["local"]:
            memory = self._memories[holder, header["slot"]][:nbytes]
            return _Incoming(header, holder, memory, None, None, None)
        assert self._outgoing is not None
        relayed = self._outgoing.claim(nbytes) if stream in self._onward else None
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device) if relayed is None else relayed.memory
        group = self._links[holder, self.rank]
        broadcast = group.start(memory if relayed is None else relayed.network)
        return _Incoming(header, holder, memory, relayed, broadcast, group)

    def _load(self, bucket: _Incoming, target: SliceTarget) -> None:
        """Wait for a bucket, pass it on if others need it, copy its slices into `target`, and acknowledge it."""
        assert self._copiers is not None and self._needed is not None
        header, stream, number = bucket.header, bucket.header["stream"], bucket.header["bucket"]
        description = self._copiers[stream].describe(number, self._needed.tensors)
        times = [time.perf_counter()]
        if bucket.group is not None:
            bucket.group.finish(bucket.broadcast, f"{description} to reach {self.name}")
        times.append(time.perf_counter())
        fingerprint: Fingerprint | None = None
        if bucket.relayed is not None:  # pass on verified bytes only
            bucket.relayed.copy_from_network()
            fingerprint = self._fingerprinter.start(bucket.memory)
            self._verify(fingerprint, bucket, description)
            onward = {key: header[key] for key in ("version", "stream", "bucket", "fingerprint")}
            assert self._outgoing is not None
            self._outgoing.send(bucket.relayed, self._onward[stream], onward, description)
        times.append(time.perf_counter())
        written, fingerprint = self._copiers[stream].unpack(
            number, bucket.memory, target.tensor, self._fingerprinter, fingerprint
        )
        times.append(time.perf_counter())
        value = self._verify(fingerprint, bucket, description)
        if header["local"]:
            self._platform.synchronize()  # the holder reuses the memory as soon as it has the acknowledgement
        self._acks.publish(bucket.holder, header["count"], value)
        times.append(time.perf_counter())
        for parameter, elements in written:  # after verification: the engine may post-process complete parameters
            target.mark_written(parameter, elements)
        times.append(time.perf_counter())
        phases = ("wait", "fingerprint", "load", "fingerprint", "load")
        for phase, begin, end in zip(phases, times[:-1], times[1:], strict=True):
            self._seconds[phase] += end - begin
        self._totals[stream].add(str(number), value)
        self._remaining[stream] -= 1
        self._bytes += len(bucket.memory)
        self._buckets += 1

    def _verify(self, fingerprint: Fingerprint, bucket: _Incoming, description: str) -> str:
        """Return the bucket's fingerprint. Raises WeightSyncError unless it equals the sender's."""
        value, sent = fingerprint.result(), bucket.header["fingerprint"]
        if value != sent:
            sender = peer_name(bucket.holder, self._session.names)
            raise WeightSyncError(
                f"receiver {self.name!r} got other bytes than {sender} sent in {description}: fingerprint {value}, sent {sent}"
            )
        return value

    def finish(self) -> ShardedReport:
        """Report to the senders that the version is loaded. Raises WeightSyncError if the trainers' export differs from it."""
        self._seconds["load"] += time.perf_counter() - self._received
        assert self._outgoing is not None, "call receive first"
        self._outgoing.drain()
        start = time.perf_counter()
        if self._check is not None:
            self._compare_with_export(self._check)
        self._seconds["check"] += time.perf_counter() - start
        report = ShardedReport(
            version=self._version,
            streams={stream_key(number, self.name): total.hexdigest() for number, total in self._totals.items()},
            bytes=self._bytes,
            buckets=self._buckets,
            checked=len(self._check.fingerprints) if self._check is not None else 0,
            seconds=self._seconds,
        )
        key = f"done/{report.version}/{self.name}"
        self._channel.publish(key, report.to_dict())
        if self._loaded_key is not None:  # senders have read it: they have sent a later version
            self._channel.delete([self._loaded_key])
        self._loaded_key = key
        self._heartbeat.end()
        return report

    def _compare_with_export(self, check: SliceFingerprints) -> None:
        assert self._needed is not None
        self._channel.publish(f"loaded/{self._version}/{self.name}", check.fingerprints)
        key = f"verdict/{self._version}/{self.name}"
        (wrong,) = self._channel.wait([key], "the trainers to compare with their export")
        self._channel.delete([key])
        if wrong:
            raise WeightSyncError(
                f"the weights that receiver {self.name!r} loaded differ from the trainers' export, in {len(wrong)} tensors: "
                + "; ".join(self._origin(name) for name in wrong[:3])
                + ". Sharded weight sync is wrong for this model or layout: set weight_sync.route=full, and report it"
            )

    def _origin(self, tensor: str) -> str:
        """Return a tensor's name with the trainers and buckets that its slices came from."""
        assert self._copiers is not None and self._needed is not None
        buckets = [
            f"bucket {bucket} of stream {number} from trainer {copier.stream.source}"
            for number, copier in self._copiers.items()
            for bucket in range(len(copier.stream.buckets))
            if tensor in copier.names(bucket, self._needed.tensors)
        ]
        return f"{tensor} ({', '.join(buckets)})"

    def fail(self, reason: str) -> None:
        """Abort the update on all ranks: this receiver could not receive or load it."""
        with contextlib.suppress(WeightSyncError):  # raised only if the store is gone, and every rank detects that
            self._channel.abort(f"receiver {self.name!r}: {reason}")
        self._heartbeat.end()

    def close(self) -> None:
        self._heartbeat.close()
        self._fingerprinter.close()
        self._memories.clear()
        self._slots.close()
        if self._outgoing is not None:  # even if planning failed: its files would remain until this process ends
            self._outgoing.close()
