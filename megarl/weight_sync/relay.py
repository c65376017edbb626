"""Whose memory the buckets of a stream lie in, and who reads them there.

A bucket is packed by a trainer into memory that engine ranks of its host read. Where the stream goes on to another host,
the first engine rank there gets it over the network, into memory of its own, out of which the others of that host read it;
and so on. So it is packed once, and crosses each network link once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megarl.weight_sync.session import FullSession, ShardedSession
from megarl.weight_sync.sharded.plan import Hosts, Stream, TransferPlan

Peer = tuple[str, int]  # ("trainer", rank) or ("engine", rank)


@dataclass(frozen=True)
class Relay:
    """The buckets of one stream, from the memory of `holder`. Numbers are those of engine ranks."""

    holder: Peer
    local: tuple[int, ...]  # who reads it there
    remote: int | None  # who gets it over the network

    @property
    def readers(self) -> tuple[int, ...]:
        return self.local if self.remote is None else (*self.local, self.remote)


def hops(stream: Stream, session: ShardedSession) -> list[Relay]:
    """In the order in which buckets take them."""
    hosts = Hosts(session.senders, [host for _, host in session.receivers])
    return path(stream.source, stream.targets, hosts, shares_memory=session.shares_memory)


def full_relays(session: FullSession) -> list[Relay]:
    """The hops of every exported bucket, host after host; engine ranks are numbered as `session.receivers`.

    A host gets a bucket once and sends it at most once, so a version takes about as long to reach many hosts as one.
    """
    sender, *receivers = session.hosts
    if session.directory is not None:  # all read files
        return [Relay(("trainer", 0), tuple(range(len(receivers))), None)]
    first = {host: number for number, host in reversed(list(enumerate(receivers)))}
    order = sorted(range(len(receivers)), key=lambda at: (receivers[at] != sender, first[receivers[at]], at))
    return path(0, order, Hosts([sender], receivers), shares_memory=session.shares_memory)


def path(source: int, targets: Sequence[int], hosts: Hosts, *, shares_memory: bool) -> list[Relay]:
    """From a trainer rank to engine ranks. `shares_memory`: ranks of a host read each other's, else all is sent."""
    found: list[Relay] = []
    holder: Peer = ("trainer", source)
    host, local = hosts.trainers[source], []
    for target in targets:
        there = hosts.engines[target]
        if shares_memory and there == host:
            local.append(target)
            continue
        found.append(Relay(holder, tuple(local), target))
        holder, host, local = ("engine", target), there, []
    return [*found, Relay(holder, tuple(local), None)] if local else found


def max_connections(made: TransferPlan, *, shares_memory: bool) -> int:
    """How many others a rank sends to, or gets from, over a network: of the rank that has the most."""
    pairs = {
        (hop.holder, hop.remote)
        for source, targets in zip(made.sources.tolist(), made.targets, strict=True)
        for hop in path(source, targets, made.hosts, shares_memory=shares_memory)
        if hop.remote is not None
    }
    ends = Counter(party for holder, reader in pairs for party in (holder, ("engine", reader)))
    return max(ends.values(), default=0)


def of_holder(holder: Peer, streams: Iterable[Stream], session: ShardedSession) -> dict[int, Relay]:
    """The hop that begins in the memory of `holder`, by number of its stream; of streams that have one."""
    return {one.number: hop for one in streams for hop in hops(one, session) if hop.holder == holder}


def name_of(party: Peer, names: Sequence[str]) -> str:
    """`names`: of the engine ranks."""
    return f"trainer {party[1]}" if party[0] == "trainer" else names[party[1]]
