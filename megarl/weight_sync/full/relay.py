"""Exported buckets in the memory of one holder: rank 0, or the first receiver of another host, which passes them on.

Rank 0 packs a bucket once. Readers of its host map the memory; the first receiver of the next host gets the bucket over gloo
into memory that the others of that host map, and passes it on to the host after that (`hops.full_relays`). While one host
receives a bucket, the hosts before it have the next ones on their way: all network links carry buckets at the same time, and
each carries a version once.
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
from megarl.weight_sync.relay import Peer, Relay, name_of
from megarl.weight_sync.session import FULL_SLOTS, FullSession, WeightSyncError, abbreviate_names
from megarl.weight_sync.shared_memory import PrivateSlot, SharedSlot
from megarl.weight_sync.store import StoreChannel


@dataclass
class _InFlight:
    """A bucket that not all readers of the hop have acknowledged yet."""

    number: int
    fingerprint: str
    names: list[str]
    slot: SharedSlot | PrivateSlot
    broadcast: Any  # a gloo work, where the hop crosses a network


class RelaySender:
    """The holder's side of a hop. At most `FULL_SLOTS` buckets lie in its memory. Not thread-safe."""

    def __init__(self, channel: StoreChannel, session: FullSession, hop: Relay) -> None:
        self._channel, self._hop = channel, hop
        names = [name for name, _ in session.receivers]
        self.holder = name_of(hop.holder, names)
        self._readers = [names[reader] for reader in hop.readers]
        shared = bool(hop.local) and session.directory is None
        self._slots = [
            SharedSlot(session.shm_dir) if shared else PrivateSlot(select("cpu").device()) for _ in range(FULL_SLOTS)
        ]
        self._bucket_bytes = session.bucket_bytes
        self._group: BroadcastGroup | None = None
        self._in_flight: deque[_InFlight] = deque()  # at most one a slot
        atexit.register(self.close)

    def connect(self) -> None:
        """Form the group of two with the next host's receiver, if there is one. It must do so at the same time."""
        if self._hop.remote is not None and self._group is None:
            self._group = BroadcastGroup(self._channel, 0, 2, select("cpu"), group_name(self._hop))

    def reserve(self, number: int, nbytes: int, *, last: bool) -> torch.Tensor:
        """Memory for bucket `number`, uint8 [nbytes], once all have read what lay there. Raises OSError where it does not fit."""
        while len(self._in_flight) == FULL_SLOTS:
            self._await_oldest()
        slot = self._slots[number % FULL_SLOTS]
        # More will come: a full-sized slot now saves growing it bucket by bucket.
        slot.reserve(nbytes if last else max(nbytes, self._bucket_bytes))
        return slot.reserve(nbytes)

    def offer(self, number: int, memory: torch.Tensor, fingerprint: str, names: list[str]) -> None:
        """Let the hop's readers have bucket `number`, which `reserve` gave memory for."""
        slot = self._slots[number % FULL_SLOTS]
        if self._hop.local:
            self._channel.publish(slot_key(number, self._hop.holder), [number % FULL_SLOTS, slot.name])
        broadcast = self._group.start(memory) if self._group is not None else None
        self._in_flight.append(_InFlight(number, fingerprint, names, slot, broadcast))

    def settle(self) -> None:
        """Wait until the hop's readers hold every bucket."""
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
        self._channel.delete([*keys, *([slot_key(bucket.number, self._hop.holder)] if self._hop.local else [])])
        self._in_flight.popleft()

    def close(self) -> None:
        """Give the slots' memory back. Waits for nobody. May be called twice."""
        atexit.unregister(self.close)
        if self._group is not None:
            self._group.close()
        for slot in self._slots:
            slot.close()


def group_name(hop: Relay) -> str:
    """The name of the group of two that carries a hop over a network."""
    return f"hop/{hop.holder[0]}{hop.holder[1]}/{hop.remote}"


def slot_key(number: int, holder: Peer) -> str:
    """Key under which a holder publishes the slot and the file of a bucket."""
    return f"slot/{number}/{holder[0]}{holder[1]}"


def ack_key(number: int, name: str) -> str:
    """Key under which receiver `name` publishes the fingerprint of a bucket."""
    return f"ack/{number}/{name}"


def mismatch(receiver: str, bucket: int, names: Sequence[str], sent: str, received: str) -> str:
    """The message for bytes that changed on their way."""
    return (
        f"receiver {receiver!r} got other bytes than were sent in bucket {bucket} ({abbreviate_names(names)}): "
        f"fingerprint {received}, sent {sent}"
    )
