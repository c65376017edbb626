"""Relays: the path of a stream's buckets through the memory of several hosts.

A trainer packs a bucket into memory that engine ranks of its host read. If the stream continues on another host, the first
engine rank there receives the bucket over the network into its memory, where the other ranks of that host read it, and so
on. So a bucket is packed once and crosses each network link once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megarl.weight_sync.session import Session
from megarl.weight_sync.sharded.plan import Hosts, Stream, TransferPlan

Peer = tuple[str, int]  # ("trainer", rank) or ("engine", rank)


@dataclass(frozen=True)
class Relay:
    """One station of a stream: `holder` has its buckets in memory. Readers are engine ranks."""

    holder: Peer
    local: tuple[int, ...]  # read the holder's memory
    remote: int | None  # receives from the holder over the network

    @property
    def readers(self) -> tuple[int, ...]:
        return self.local if self.remote is None else (*self.local, self.remote)


def stream_relays(stream: Stream, session: Session) -> list[Relay]:
    """Return the relays of a stream, in the order that buckets pass them."""
    hosts = Hosts(session.senders, [host for _, host in session.receivers])
    return relay_path(stream.source, stream.targets, hosts, shares_memory=session.shares_memory)


def full_relays(session: Session) -> list[Relay]:
    """Return the relays of every bucket of a full session, host after host. Engine ranks are indices of `session.receivers`.

    A host receives a bucket once and sends it at most once. So a version reaches many hosts in about the time of one.
    """
    sender, receivers = session.senders[0], [host for _, host in session.receivers]
    if session.directory is not None:  # every receiver reads files
        return [Relay(("trainer", 0), tuple(range(len(receivers))), None)]
    first = {host: number for number, host in reversed(list(enumerate(receivers)))}
    order = sorted(range(len(receivers)), key=lambda at: (receivers[at] != sender, first[receivers[at]], at))
    return relay_path(0, order, Hosts([sender], receivers), shares_memory=session.shares_memory)


def relay_path(source: int, targets: Sequence[int], hosts: Hosts, *, shares_memory: bool) -> list[Relay]:
    """Return the relays from a trainer rank to engine ranks.

    `shares_memory`: ranks of a host read each other's memory; otherwise every rank receives its own copy.
    """
    relays: list[Relay] = []
    holder: Peer = ("trainer", source)
    host, local = hosts.trainers[source], []
    for target in targets:
        target_host = hosts.engines[target]
        if shares_memory and target_host == host:
            local.append(target)
            continue
        relays.append(Relay(holder, tuple(local), target))
        holder, host, local = ("engine", target), target_host, []
    return [*relays, Relay(holder, tuple(local), None)] if local else relays


def max_connections(plan: TransferPlan, *, shares_memory: bool) -> int:
    """Return the largest number of network connections that any rank has."""
    links = {
        (relay.holder, relay.remote)
        for source, targets in zip(plan.sources.tolist(), plan.targets, strict=True)
        for relay in relay_path(source, targets, plan.hosts, shares_memory=shares_memory)
        if relay.remote is not None
    }
    ends = Counter(peer for holder, reader in links for peer in (holder, ("engine", reader)))
    return max(ends.values(), default=0)


def relays_from(holder: Peer, streams: Iterable[Stream], session: Session) -> dict[int, Relay]:
    """Return the relay of each stream that `holder` has to pass on, by the stream's number."""
    return {
        stream.number: relay for stream in streams for relay in stream_relays(stream, session) if relay.holder == holder
    }


def peer_name(peer: Peer, names: Sequence[str]) -> str:
    """Return a peer's name for messages. `names`: of the engine ranks."""
    return f"trainer {peer[1]}" if peer[0] == "trainer" else names[peer[1]]
