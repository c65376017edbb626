"""Buckets that a rank holds for others: packed, announced, and free again when everyone has said what it read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.platform import select
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Peer, Relay, name_of
from megarl.weight_sync.session import SHARDED_SLOTS, ShardedSession, WeightSyncError
from megarl.weight_sync.sharded.mailbox import MailboxWriter, await_answers, expect_answers
from megarl.weight_sync.shared_memory import DeviceSlot, PrivateSlot, SharedSlot
from megarl.weight_sync.store import StoreChannel

Link = tuple[Peer, int]  # whose memory, and which engine rank gets it over the network


@dataclass
class Held:
    """Memory for one bucket."""

    slot: int
    memory: torch.Tensor  # uint8
    network: torch.Tensor  # uint8, what crosses a network: `memory` itself, or its copy in the host's memory

    def copy_to_network(self) -> None:
        """After packing `memory`."""
        if self.network is not self.memory:
            self.network.copy_(self.memory)

    def copy_from_network(self) -> None:
        """After `network` has arrived."""
        if self.network is not self.memory:
            self.memory.copy_(self.network)


@dataclass
class _InFlight:
    held: Held
    count: int  # of this holder's buckets
    fingerprint: str
    what: str
    hop: Relay
    broadcast: Any  # under way, where a reader gets it over a network


class OutgoingBuckets:
    def __init__(
        self, channel: StoreChannel, session: ShardedSession, party: Peer, hops: Iterable[Relay], bucket_bytes: int
    ) -> None:
        """Begin to connect to readers; `connect` ends it. `hops`: all that begin with `party`. `bucket_bytes`: of the
        largest bucket."""
        self._channel, self._session, self._party = channel, session, party
        hops = list(hops)
        self._local = sorted({reader for hop in hops for reader in hop.local})
        self._readers = sorted({reader for hop in hops for reader in hop.readers})
        number = SHARDED_SLOTS if hops else 0
        slots = [self._slot() for _ in range(number)]
        self._slots = slots
        # An engine rank's buckets have arrived over a network, also those that go no further.
        crosses = party[0] == "engine" or any(hop.remote is not None for hop in hops)
        copies = crosses and session.stays_on_devices
        self._copies = [PrivateSlot(select("cpu").device()) for _ in range(number if copies else 0)]
        self._free = list(range(len(slots)))
        self._in_flight: list[_InFlight] = []  # oldest first
        self._count = 0
        self._links: Mapping[Link, BroadcastGroup] = {}
        with contextlib.ExitStack() as undo:  # nobody else would give the memory back
            undo.callback(self.close)
            for slot in slots:
                slot.reserve(bucket_bytes)
            expect_answers(channel, party, self._readers)
            for reader in self._local:
                channel.publish(
                    handles(party, reader), [slot.handle() for slot in slots if not isinstance(slot, PrivateSlot)]
                )
            undo.pop_all()

    def _slot(self) -> SharedSlot | DeviceSlot | PrivateSlot:
        session = self._session
        if not self._local:  # `device`, also where gloo gets a copy: sums of words are slow on a host
            return PrivateSlot(select(session.device).device())
        return DeviceSlot(select(session.device)) if session.stays_on_devices else SharedSlot(session.shm_dir)

    def connect(self, links: Mapping[Link, BroadcastGroup]) -> None:
        """Wait until the readers of this host have mapped the memory, whose files then need no name. `links`: of
        `form_links`, which from now on are this outbox's."""
        self._links = links
        names = ", ".join(self._session.names[reader] for reader in self._local)
        self._channel.wait([mapped(self._party, reader) for reader in self._local], f"{names} to map its memory")
        for slot in self._slots:
            slot.unlink()
        self._inboxes = MailboxWriter(self._channel, self._readers, "engines to plan what they receive")

    def claim(self, nbytes: int) -> Held:
        """Memory for a bucket; waits until the oldest one has been read where all of it is in use."""
        if not self._free:
            self._settle()
        number = self._free.pop(0)
        memory = self._slots[number].reserve(nbytes)
        return Held(number, memory, self._copies[number].reserve(nbytes) if self._copies else memory)

    def send(self, held: Held, hop: Relay, header: dict[str, Any], what: str) -> None:
        """Announce a packed bucket. `header` has its `fingerprint`; `what` says in errors which one it is."""
        told = {
            **header,
            "holder": list(self._party),
            "count": self._count,
            "slot": held.slot,
        }
        for reader in hop.local:
            self._inboxes.tell(reader, {**told, "local": True})
        broadcast = None
        if hop.remote is not None:
            self._inboxes.tell(hop.remote, {**told, "local": False})
            broadcast = self._links[self._party, hop.remote].start(held.network)
        self._in_flight.append(_InFlight(held, self._count, header["fingerprint"], what, hop, broadcast))
        self._count += 1

    def drain(self) -> None:
        """Wait until everything has been read."""
        while self._in_flight:
            self._settle()

    def _settle(self) -> None:
        """Wait until the oldest bucket has been read, and read right."""
        bucket = self._in_flight[0]
        names = self._session.names
        readers = bucket.hop.readers
        if bucket.broadcast is not None:
            assert bucket.hop.remote is not None
            group = self._links[self._party, bucket.hop.remote]
            group.finish(bucket.broadcast, f"{bucket.what} to reach {names[bucket.hop.remote]}")
        values = await_answers(
            self._channel, self._party, bucket.count, readers, [names[reader] for reader in readers], bucket.what
        )
        for reader, value in zip(readers, values, strict=True):
            if value != bucket.fingerprint:
                raise WeightSyncError(
                    f"receiver {names[reader]!r} got other bytes than {name_of(self._party, names)} sent in "
                    f"{bucket.what}: fingerprint {value}, sent {bucket.fingerprint}"
                )
        self._in_flight.pop(0)
        self._free.append(bucket.held.slot)

    def close(self) -> None:
        """Give memory and `links` back. Waits for nobody."""
        for link in self._links.values():
            link.close()
        for slot in [*self._slots, *self._copies]:
            slot.close()


def handles(holder: Peer, reader: int) -> str:
    """Where a holder says how engine rank `reader` maps its memory."""
    return f"handles/{holder[0]}{holder[1]}/{reader}"


def mapped(holder: Peer, reader: int) -> str:
    """Where engine rank `reader` says that it has mapped them."""
    return f"mapped/{holder[0]}{holder[1]}/{reader}"


def form_links(
    channel: StoreChannel, session: ShardedSession, party: Peer, hops: Iterable[Relay]
) -> dict[Link, BroadcastGroup]:
    """The connections over a network that `party` takes part in, on either side. `hops`: all that it has to do with.

    Everyone forms its own in the same order, so that the first of all that is not formed yet has both ends waiting for it."""
    wanted = sorted(
        {
            (hop.holder, hop.remote)
            for hop in hops
            if hop.remote is not None and party in (hop.holder, ("engine", hop.remote))
        }
    )
    client, platform = session.open_store() if wanted else None, select(session.network_device)
    links: dict[Link, BroadcastGroup] = {}
    with contextlib.ExitStack() as undo:  # those that were formed before one that could not be
        for holder, reader in wanted:
            name, rank = f"link/{holder[0]}{holder[1]}/{reader}", 0 if holder == party else 1
            group = BroadcastGroup(channel, rank, 2, platform, name, client)
            links[holder, reader] = undo.enter_context(contextlib.closing(group))
        undo.pop_all()
    return links
