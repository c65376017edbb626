"""Buckets of the full route in the memory of one rank: rank 0, or the first receiver of another host, which passes them on.

Rank 0 packs a bucket once. Receivers of its host map the memory. The first receiver of the next host gets the bucket over
gloo into memory that the others of that host map, and sends it to the host after that (`megarl.weight_sync.relay.full_relays`).
While one host receives a bucket, the hosts before it already have the next ones in flight: all network links are busy at the
same time, and each carries a version once.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.platform import select
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Peer, Relay, peer_name
from megarl.weight_sync.session import FULL_SLOTS, FullSession, WeightSyncError, abbreviate_names
from megarl.weight_sync.shared_memory import PrivateSlot, SharedSlot
from megarl.weight_sync.store import StoreChannel


@dataclass
class _OfferedBucket:
    """A bucket that some readers of the relay have not acknowledged yet."""

    number: int
    fingerprint: str
    names: list[str]
    slot: SharedSlot | PrivateSlot
    broadcast: Any  # a gloo work if the relay crosses a network


class RelaySender:
    """The holder's side of a relay. It holds at most `FULL_SLOTS` buckets. Not thread-safe."""

    def __init__(self, channel: StoreChannel, session: FullSession, relay: Relay) -> None:
        self._channel, self._relay = channel, relay
        names = [name for name, _ in session.receivers]
        self.holder = peer_name(relay.holder, names)
        self._readers = [names[reader] for reader in relay.readers]
        shared = bool(relay.local) and session.directory is None
        self._slots = [
            SharedSlot(session.shm_dir) if shared else PrivateSlot(select("cpu").device()) for _ in range(FULL_SLOTS)
        ]
        self._bucket_bytes = session.bucket_bytes
        self._group: BroadcastGroup | None = None
        self._in_flight: deque[_OfferedBucket] = deque()  # at most one per slot
        atexit.register(self.close)

    def connect(self) -> None:
        """Form the process group with the next host's receiver, if any. That receiver must do so at the same time."""
        if self._relay.remote is not None and self._group is None:
            self._group = BroadcastGroup(self._channel, 0, 2, select("cpu"), group_name(self._relay))

    def reserve(self, number: int, nbytes: int, *, last: bool) -> torch.Tensor:
        """Wait for a free slot and return memory for bucket `number`, uint8 [nbytes]. Raises OSError if it does not fit."""
        while len(self._in_flight) == FULL_SLOTS:
            self._await_oldest()
        slot = self._slots[number % FULL_SLOTS]
        # Unless it is the last bucket, allocate the full size now instead of growing bucket by bucket.
        slot.reserve(nbytes if last else max(nbytes, self._bucket_bytes))
        return slot.reserve(nbytes)

    def offer(self, number: int, memory: torch.Tensor, fingerprint: str, names: list[str]) -> None:
        """Announce bucket `number` to the relay's readers. `memory`: from `reserve`."""
        slot = self._slots[number % FULL_SLOTS]
        if self._relay.local:
            self._channel.publish(slot_key(number, self._relay.holder), [number % FULL_SLOTS, slot.name])
        broadcast = self._group.start(memory) if self._group is not None else None
        self._in_flight.append(_OfferedBucket(number, fingerprint, names, slot, broadcast))

    def settle(self) -> None:
        """Wait until the relay's readers have every bucket."""
        while self._in_flight:
            self._await_oldest()

    def _await_oldest(self) -> None:
        bucket = self._in_flight[0]
        if bucket.broadcast is not None:
            assert self._group is not None
            self._group.finish(bucket.broadcast, f"the broadcast of bucket {bucket.number}")
        keys = [ack_key(bucket.number, name) for name in self._readers]
        values = self._channel.wait(keys, f"acknowledgements of bucket {bucket.number}")
        for name, value in zip(self._readers, values, strict=True):
            if value != bucket.fingerprint:
                raise WeightSyncError(mismatch(name, bucket.number, bucket.names, bucket.fingerprint, value))
        bucket.slot.unlink()
        self._channel.delete([*keys, *([slot_key(bucket.number, self._relay.holder)] if self._relay.local else [])])
        self._in_flight.popleft()

    def close(self) -> None:
        """Free the slots without waiting. May be called twice."""
        atexit.unregister(self.close)
        if self._group is not None:
            self._group.close()
        for slot in self._slots:
            slot.close()


def group_name(relay: Relay) -> str:
    """Name of the process group that carries a relay over a network."""
    return f"relay/{relay.holder[0]}{relay.holder[1]}/{relay.remote}"


def slot_key(number: int, holder: Peer) -> str:
    """Key of a bucket's slot number and file name."""
    return f"slot/{number}/{holder[0]}{holder[1]}"


def ack_key(number: int, name: str) -> str:
    """Key of the fingerprint with which receiver `name` acknowledges a bucket."""
    return f"ack/{number}/{name}"


def mismatch(receiver: str, bucket: int, names: Sequence[str], sent: str, received: str) -> str:
    """Return the message for a bucket that changed in transfer."""
    return (
        f"receiver {receiver!r} got other bytes than were sent in bucket {bucket} ({abbreviate_names(names)}): "
        f"fingerprint {received}, sent {sent}"
    )
