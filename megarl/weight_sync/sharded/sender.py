"""A trainer rank's side of sharded weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.weight_sync.fingerprint import Fingerprint, VersionFingerprint
from megarl.weight_sync.outgoing import BucketMemory, OutgoingBuckets, form_links
from megarl.weight_sync.relay import Peer, relays_from
from megarl.weight_sync.sender import Export, Sender
from megarl.weight_sync.session import PhaseTimer, Session, UpdateReport, stream_key
from megarl.weight_sync.sharded import manifest
from megarl.weight_sync.sharded.copy import StreamCopier
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.sharded.verify import differing_tensors, expected_fingerprints
from megarl.weight_sync.store import LOAD_PAUSE


@dataclass
class _Packed:
    """A packed bucket, not yet announced: its fingerprint is being computed."""

    stream: int
    bucket: int
    memory: BucketMemory
    fingerprint: Fingerprint


class ShardedSender(Sender):
    """Sends this rank's streams of every version. Every trainer rank has one."""

    def __init__(
        self,
        session: Session,
        rank: int,
        held: SliceTable,
        tensors: Callable[[], Sequence[torch.Tensor]],
        store: Any = None,
    ) -> None:
        """`held`: this rank's slice table. `tensors` returns its parameters' current values, in the order of `held`.

        `store`: the session's store, in the process that serves it.
        """
        self._held, self._tensors = held, tensors
        self._copiers: dict[int, StreamCopier] | None = None  # by stream, once planned
        self._first: int | None = None  # the first version sent
        super().__init__(session, rank, store)

    def _join(self) -> None:
        manifest.publish(self._channel, manifest.held_key(self._rank), self._held)

    def exports(self, version: int) -> bool:
        return self.session.is_checked(version, version if self._first is None else self._first)

    def _send(self, version: int, export: Export) -> UpdateReport:
        """If the update is checked, this call is collective over the trainer's ranks: it calls `export` and drains it."""
        timer = PhaseTimer("pack", "fingerprint", "wait", "check")
        copiers = self._plan() if self._copiers is None else self._copiers
        assert self._outgoing is not None
        self._first = version if self._first is None else self._first
        totals = {number: VersionFingerprint() for number in copiers}
        nbytes = buckets = 0
        tensors = self._tensors()
        assert all(tensor.is_contiguous() for tensor in tensors), "slices are locations in contiguous memory"
        last: _Packed | None = None
        timer.start()
        for number, bucket in _interleaved(copiers):
            size = copiers[number].nbytes(bucket)
            memory = self._outgoing.claim(size)
            timer.lap("wait")
            fingerprint = copiers[number].pack(bucket, memory.memory, tensors.__getitem__, self._fingerprinter)
            if self._relays[number].remote is not None:
                memory.copy_to_network()
            timer.lap("pack")
            self._announce(version, last, totals)
            last = _Packed(number, bucket, memory, fingerprint)
            timer.lap("fingerprint")
            nbytes, buckets = nbytes + size, buckets + 1
        self._announce(version, last, totals)
        timer.lap("fingerprint")
        self._outgoing.drain()
        timer.lap("wait")
        checked = self._check(version, export) if self.session.is_checked(version, self._first) else 0
        timer.lap("check")
        streams = {
            stream_key(number, self.session.names[target]): totals[number].hexdigest()
            for number, copier in copiers.items()
            for target in copier.stream.targets
        }
        return UpdateReport(version, streams, nbytes, buckets, checked, timer.seconds)

    def _announce(self, version: int, packed: _Packed | None, totals: dict[int, VersionFingerprint]) -> None:
        """Send a packed bucket to its readers, once its fingerprint is computed."""
        if packed is None:
            return
        assert self._outgoing is not None and self._copiers is not None
        number, bucket, value = packed.stream, packed.bucket, packed.fingerprint.result()
        header = {
            "version": version,
            "stream": number,
            "bucket": bucket,
            "content": str(bucket),
            "nbytes": len(packed.memory.memory),
            "fingerprint": value,
        }
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
        self._targets = sorted({target for stream in streams for target in stream.targets})
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
            awaited = f"receiver {name!r} to publish the fingerprints of its weights"
            (loaded,) = self._channel.wait([key], awaited, longest_pause=LOAD_PAUSE)
            self._channel.delete([key])
            self._channel.publish(f"verdict/{version}/{name}", differing_tensors(table, loaded, expected))
        return sum(len(expected) for expected in all_expected)


def _interleaved(copiers: dict[int, StreamCopier]) -> Iterator[tuple[int, int]]:
    """Yield (stream, bucket): the first bucket of each stream, then the second of each, so that all engine ranks have work."""
    longest = max((len(copier.stream.bucket_elements) for copier in copiers.values()), default=0)
    for bucket in range(longest):
        for number, copier in copiers.items():
            if bucket < len(copier.stream.bucket_elements):
                yield number, bucket
