"""Buckets that an engine rank receives: announced, transferred, passed on if others need them, verified, acknowledged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.platform import select
from megarl.weight_sync.fingerprint import Fingerprint, Fingerprinter, VersionFingerprint
from megarl.weight_sync.mailbox import AckWriter, Mailbox
from megarl.weight_sync.outgoing import BucketMemory, OutgoingBuckets, form_links, handles_key, mapped_key
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Peer, Relay, peer_name
from megarl.weight_sync.session import RECEIVE_AHEAD, PhaseTimer, UpdateReport, WeightSyncError, stream_key
from megarl.weight_sync.shared_memory import MappedSlots
from megarl.weight_sync.store import StoreChannel


@dataclass
class IncomingBucket:
    """An announced bucket. `memory` is complete once `IncomingBuckets.take` yields it."""

    header: dict[str, Any]
    description: str  # for messages
    holder: Peer
    memory: torch.Tensor  # uint8
    relayed: BucketMemory | None  # holds `memory` if this rank passes the bucket on
    broadcast: Any  # the network transfer, or None
    group: BroadcastGroup | None
    fingerprint: Fingerprint | None = None  # of `memory`, if already computed


class IncomingBuckets:
    """Buckets that one engine rank reads and, as a relay, passes on."""

    def __init__(
        self,
        channel: StoreChannel,
        rank: int,
        incoming: Sequence[Relay],
        onward: Mapping[int, Relay],
        largest: int,
        describe: Callable[[dict[str, Any]], str],
        fingerprinter: Fingerprinter,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Connect with all holders and readers, which must do so at the same time.

        `incoming`: relays that this rank reads. `onward`: relays that start at this rank, by stream. `largest`:
        `bucket_bytes` of `OutgoingBuckets`. `describe` returns the description of a bucket from its header. `allocate` returns
        memory for a bucket that arrives over the network and is not passed on.
        """
        self._channel, self._session, self._rank = channel, channel.session, rank
        self._name = self._session.names[rank]
        # A relay leaves half of its slots to the buckets that its readers load.
        self._max_ahead = self._session.slots // 2 if onward else RECEIVE_AHEAD
        self._onward, self._describe, self._fingerprinter = onward, describe, fingerprinter
        # Explicit for every allocation: vLLM changes torch's default device around a receiver.
        device = select(self._session.network_device).device()
        self._allocate = allocate or (lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device))
        self._platform = select(self._session.device)
        self._slots = MappedSlots(self._session.shm_dir)
        self._memories: dict[tuple[Peer, int], torch.Tensor] = {}
        self._mailbox = Mailbox(channel, rank, len({relay.holder for relay in incoming}))
        self._acks = AckWriter(channel, rank)
        peer: Peer = ("engine", rank)
        self._outgoing = OutgoingBuckets(channel, self._session, peer, onward.values(), largest)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for holder in sorted({relay.holder for relay in incoming if largest and rank in relay.local}):
                self._map(holder)
            self._links = form_links(channel, self._session, peer, [*incoming, *onward.values()])
            self._outgoing.connect(self._links)
            undo.pop_all()

    def _map(self, holder: Peer) -> None:
        name = peer_name(holder, self._session.names)
        (handles,) = self._channel.wait([handles_key(holder, self._rank)], f"{name} to share its memory")
        for slot, handle in enumerate(handles):
            self._memories[holder, slot] = self._open((holder, slot), handle, name)
        self._channel.publish(mapped_key(holder, self._rank), True)

    def _open(self, slot: tuple[Peer, int], handle: Any, holder: str) -> torch.Tensor:
        if not self._session.stays_on_devices:
            return self._slots.memory(slot, handle)
        try:
            return self._platform.open_shared(handle)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"receiver {self._name!r} cannot map the device memory of {holder} ({error}). Devices must reach each other, and "
                "containers must share IPC and PID namespaces (docker run --ipc=host --pid=host); weight_sync.transport=auto "
                "goes through host memory"
            ) from error

    def begin(self, version: int, streams: Sequence[int]) -> PhaseTimer:
        """Start the update to `version`, of these streams. Returns the timer of its phases."""
        self._version, self.timer = version, PhaseTimer("wait", "fingerprint", "load", "check")
        self._totals = {number: VersionFingerprint() for number in streams}
        self._bytes = self._buckets = 0
        return self.timer

    def take(self, expected: float, awaited: Callable[[], str]) -> Iterator[IncomingBucket]:
        """Yield the buckets of the update, each after the former was acknowledged.

        `expected`: their number; math.inf: until a bucket with `last` in its header.
        `awaited` describes the next bucket in error messages. Raises WeightSyncError for a wrong version, changed bytes, an
        abort, or a sender that died or stopped.
        """
        ahead: list[IncomingBucket] = []
        announced = 0
        self.timer.start()
        while self._buckets < expected:
            while announced < expected and len(ahead) < self._max_ahead:
                header = self._mailbox.poll() if ahead else self._mailbox.wait(f"{self._name}: {awaited()}")
                if header is None:
                    break
                ahead.append(self._start(header))
                announced += 1
                expected = announced if header.get("last") else expected
            self.timer.lap("wait")
            bucket = ahead.pop(0)
            self._complete(bucket)
            yield bucket

    def _start(self, header: dict[str, Any]) -> IncomingBucket:
        """Find the memory of an announced bucket, or start its network transfer."""
        if header["version"] != self._version:
            raise WeightSyncError(f"receiver {self._name!r} expects version {self._version}, got {header['version']}")
        holder: Peer = (header["holder"][0], header["holder"][1])
        nbytes, description = header["nbytes"], self._describe(header)
        if header["local"]:
            slot = (holder, header["slot"])
            if slot in self._memories:
                memory = self._memories[slot][:nbytes]
            elif header["slot_file"]:
                memory = self._slots.memory(slot, header["slot_file"])[:nbytes]
            else:
                memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the bucket is in a file
            return IncomingBucket(header, description, holder, memory, None, None, None)
        relayed = None
        if header["stream"] in self._onward:
            relayed = self._outgoing.claim(nbytes, reserve=header.get("reserve", 0))
        memory = self._allocate(nbytes) if relayed is None else relayed.memory
        group = self._links[holder, self._rank]
        broadcast = group.start(memory if relayed is None else relayed.network)
        return IncomingBucket(header, description, holder, memory, relayed, broadcast, group)

    def _complete(self, bucket: IncomingBucket) -> None:
        """Wait for a bucket's bytes, and pass it on if others need it."""
        if bucket.group is not None:
            bucket.group.finish(bucket.broadcast, f"{bucket.description} to reach {self._name}")
        self.timer.lap("wait")
        if bucket.relayed is not None:  # pass on verified bytes only
            bucket.relayed.copy_from_network()
            bucket.fingerprint = self._fingerprinter.start(bucket.memory)
            self._verify(bucket, bucket.fingerprint)
            local = ("holder", "count", "slot", "slot_file", "local", "number")
            onward = {key: value for key, value in bucket.header.items() if key not in local}
            self._outgoing.send(bucket.relayed, self._onward[bucket.header["stream"]], onward, bucket.description)
        self.timer.lap("fingerprint")

    def acknowledge(self, bucket: IncomingBucket, fingerprint: Fingerprint) -> None:
        """Verify the bucket's fingerprint and let its holder reuse the memory."""
        header, value = bucket.header, self._verify(bucket, fingerprint)
        if header["local"]:
            self._platform.synchronize()  # the holder reuses the memory as soon as it has the acknowledgement
        self._acks.publish(bucket.holder, header["count"], value)
        self._totals[header["stream"]].add(header["content"], value)
        self._bytes += header["nbytes"]
        self._buckets += 1
        self.timer.lap("fingerprint")

    def _verify(self, bucket: IncomingBucket, fingerprint: Fingerprint) -> str:
        """Return the bucket's fingerprint. Raises WeightSyncError unless it equals the sender's."""
        value, sent = fingerprint.result(), bucket.header["fingerprint"]
        if value != sent:
            sender = peer_name(bucket.holder, self._session.names)
            raise WeightSyncError(
                f"receiver {self._name!r} got other bytes than {sender} sent in {bucket.description}: fingerprint {value}, "
                f"sent {sent}"
            )
        return value

    def drain(self) -> None:
        """Wait until the buckets that this rank passes on have been read."""
        self._outgoing.drain()

    def report(self, checked: int = 0) -> UpdateReport:
        """Report the update. `checked`: slices compared with the trainers' export."""
        return UpdateReport(
            version=self._version,
            streams={stream_key(number, self._name): total.hexdigest() for number, total in self._totals.items()},
            bytes=self._bytes,
            buckets=self._buckets,
            checked=checked,
            seconds=self.timer.seconds,
        )

    def close(self) -> None:
        self._memories.clear()
        self._slots.close()
        self._outgoing.close()
