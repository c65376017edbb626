"""Buckets that a rank holds for its readers: packed, announced, and reused once all readers have acknowledged them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.platform import select
from megarl.weight_sync.mailbox import MailboxWriter, create_ack_keys, wait_for_acks
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Peer, Relay, peer_name
from megarl.weight_sync.session import Session, WeightSyncError
from megarl.weight_sync.shared_memory import DeviceSlot, PrivateSlot, SharedSlot
from megarl.weight_sync.store import StoreChannel

Link = tuple[Peer, int]  # a holder, and the engine rank that receives from it over the network


@dataclass
class BucketMemory:
    """Memory for one bucket."""

    slot: int
    memory: torch.Tensor  # uint8
    network: torch.Tensor  # uint8, for network transfers: `memory` itself, or a copy in host memory

    def copy_to_network(self) -> None:
        """Call after `memory` is packed."""
        if self.network is not self.memory:
            self.network.copy_(self.memory)

    def copy_from_network(self) -> None:
        """Call after `network` is received."""
        if self.network is not self.memory:
            self.memory.copy_(self.network)


@dataclass
class _SentBucket:
    memory: BucketMemory
    count: int  # number among this holder's buckets, over all versions
    fingerprint: str
    description: str
    relay: Relay
    broadcast: Any  # the running network transfer, or None


class OutgoingBuckets:
    """The slots of one holder and the buckets in them."""

    def __init__(
        self,
        channel: StoreChannel,
        session: Session,
        holder: Peer,
        relays: Iterable[Relay],
        bucket_bytes: int,
    ) -> None:
        """Allocate and offer the slots; `connect` completes the connection to readers.

        `relays`: every relay that starts at `holder`. `bucket_bytes`: of the largest bucket, for slots that readers map now.
        0: slots grow, and the notice of a bucket names the file to map.
        """
        self._channel, self._session, self._holder = channel, session, holder
        relays = list(relays)
        self._local = sorted({reader for relay in relays for reader in relay.local})
        self._readers = sorted({reader for relay in relays for reader in relay.readers})
        self._mapping = self._local if bucket_bytes else []
        number = session.slots if relays else 0
        slots = [self._new_slot() for _ in range(number)]
        self._slots = slots
        # An engine rank received its buckets over the network, so it needs network memory even if all readers are local.
        crosses = holder[0] == "engine" or any(relay.remote is not None for relay in relays)
        copies = crosses and session.stays_on_devices
        self._copies = [PrivateSlot(select("cpu").device()) for _ in range(number if copies else 0)]
        self._free = list(range(len(slots)))
        self._in_flight: list[_SentBucket] = []  # oldest first
        self._count = 0
        self._links: Mapping[Link, BroadcastGroup] = {}
        with contextlib.ExitStack() as undo:  # free the memory if a step fails
            undo.callback(self.close)
            for slot in slots:
                slot.reserve(bucket_bytes)
            create_ack_keys(channel, holder, self._readers)
            for reader in self._mapping:
                channel.publish(
                    handles_key(holder, reader), [slot.handle() for slot in slots if not isinstance(slot, PrivateSlot)]
                )
            undo.pop_all()

    def _new_slot(self) -> SharedSlot | DeviceSlot | PrivateSlot:
        session = self._session
        if not self._local or session.directory is not None:
            # In device memory even if gloo sends a host copy: fingerprints are faster on the device.
            return PrivateSlot(select(session.device).device())
        return DeviceSlot(select(session.device)) if session.stays_on_devices else SharedSlot(session.shm_dir)

    def connect(self, links: Mapping[Link, BroadcastGroup]) -> None:
        """Wait until local readers have mapped the slots, then unlink their files.

        `links`: the result of `form_links`. This object owns them: `close` closes them.
        """
        self._links = links
        names = ", ".join(self._session.names[reader] for reader in self._mapping)
        self._channel.wait([mapped_key(self._holder, reader) for reader in self._mapping], f"{names} to map its memory")
        for slot in self._slots:
            slot.unlink()
        self._mailboxes = MailboxWriter(self._channel, self._readers, "engines to plan what they receive")

    def claim(self, nbytes: int, *, reserve: int = 0) -> BucketMemory:
        """Return memory for a bucket. If all slots are in use, waits until the oldest bucket has been read.

        A slot grows to `reserve` bytes at least. Raises OSError if it does not fit.
        """
        if not self._free:
            self._wait_for_oldest()
        number = self._free.pop(0)
        memory = self._slots[number].reserve(max(nbytes, reserve))[:nbytes]
        return BucketMemory(number, memory, self._copies[number].reserve(nbytes) if self._copies else memory)

    def send(self, memory: BucketMemory, relay: Relay, header: dict[str, Any], description: str) -> None:
        """Announce a packed bucket. `header` has its `fingerprint`; `description` is for error messages."""
        notice = {
            **header,
            "holder": list(self._holder),
            "count": self._count,
            "slot": memory.slot,
            "slot_file": self._slots[memory.slot].name,
        }
        for reader in relay.local:
            self._mailboxes.post(reader, {**notice, "local": True})
        broadcast = None
        if relay.remote is not None:
            self._mailboxes.post(relay.remote, {**notice, "local": False})
            broadcast = self._links[self._holder, relay.remote].start(memory.network)
        self._in_flight.append(_SentBucket(memory, self._count, header["fingerprint"], description, relay, broadcast))
        self._count += 1

    def drain(self) -> None:
        """Wait until all buckets have been read."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest bucket's readers, compare their fingerprints and free its slot."""
        bucket = self._in_flight[0]
        names = self._session.names
        readers = bucket.relay.readers
        if bucket.broadcast is not None:
            assert bucket.relay.remote is not None
            group = self._links[self._holder, bucket.relay.remote]
            group.finish(bucket.broadcast, f"{bucket.description} to reach {names[bucket.relay.remote]}")
        values = wait_for_acks(
            self._channel,
            self._holder,
            bucket.count,
            readers,
            [names[reader] for reader in readers],
            bucket.description,
        )
        for reader, value in zip(readers, values, strict=True):
            if value != bucket.fingerprint:
                raise WeightSyncError(
                    f"receiver {names[reader]!r} got other bytes than {peer_name(self._holder, names)} sent in "
                    f"{bucket.description}: fingerprint {value}, sent {bucket.fingerprint}"
                )
        self._slots[bucket.memory.slot].unlink()  # every reader has mapped it
        self._in_flight.pop(0)
        self._free.append(bucket.memory.slot)

    def close(self) -> None:
        """Free the slots and close the links, without waiting."""
        with contextlib.ExitStack() as closing:  # the links first, and each part even if another one raises
            for part in [*self._slots, *self._copies, *self._links.values()]:
                closing.callback(part.close)


def handles_key(holder: Peer, reader: int) -> str:
    """Key of the handles with which engine rank `reader` maps the holder's slots."""
    return f"handles/{holder[0]}{holder[1]}/{reader}"


def mapped_key(holder: Peer, reader: int) -> str:
    """Key that engine rank `reader` publishes once it has mapped the holder's slots."""
    return f"mapped/{holder[0]}{holder[1]}/{reader}"


def form_links(
    channel: StoreChannel, session: Session, peer: Peer, relays: Iterable[Relay]
) -> dict[Link, BroadcastGroup]:
    """Form all network connections of `peer`, as holder or as reader. `relays`: every relay of `peer`.

    Every rank forms its links in sorted order. So both ends of the first unformed link are always waiting for it, and no
    deadlock is possible.
    """
    keys = sorted(
        {
            (relay.holder, relay.remote)
            for relay in relays
            if relay.remote is not None and peer in (relay.holder, ("engine", relay.remote))
        }
    )
    client, platform = session.open_store() if keys else None, select(session.network_device)
    links: dict[Link, BroadcastGroup] = {}
    with contextlib.ExitStack() as undo:  # close the formed ones if one fails
        for holder, reader in keys:
            name, rank = f"link/{holder[0]}{holder[1]}/{reader}", 0 if holder == peer else 1
            group = BroadcastGroup(channel, rank, 2, platform, name, client)
            links[holder, reader] = undo.enter_context(contextlib.closing(group))
        undo.pop_all()
    return links
