"""An engine rank's side of sharded weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megarl.weight_sync.incoming import IncomingBucket, IncomingBuckets
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.relay import relays_from, stream_relays
from megarl.weight_sync.session import Session, UpdateReport, WeightSyncError
from megarl.weight_sync.sharded import manifest
from megarl.weight_sync.sharded.copy import StreamCopier
from megarl.weight_sync.sharded.slices import SliceTable
from megarl.weight_sync.sharded.verify import SliceFingerprints
from megarl.weight_sync.store import LOAD_PAUSE

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
class StagedBucket:
    """A bucket that waits in host memory."""

    memory: torch.Tensor  # uint8
    fingerprint: str = ""


class ShardedReceiver(Receiver):
    """First call `collect_held` and `publish_needed`. For each version call `begin`, `receive`, finish loading in the engine,
    then `finish`; or `begin`, `stage` and `finish`, and `load_staged` at any time until the next `begin`.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._held: list[SliceTable] = []
        self._needed: SliceTable | None = None
        self._copiers: dict[int, StreamCopier] = {}  # by stream, once planned
        self._first: int | None = None  # the first version received
        self._staged: dict[tuple[int, int], StagedBucket] = {}  # by stream and bucket
        super().__init__(session, name)

    def collect_held(self) -> list[SliceTable]:
        """Wait for the slice tables of all trainer ranks and return them in the order of ranks."""
        ranks = range(len(self.session.senders))
        self._held = manifest.collect(
            self._channel, [manifest.held_key(rank) for rank in ranks], "the trainers' slice tables"
        )
        return self._held

    def publish_needed(self, needed: SliceTable) -> None:
        """Publish the slices that this rank needs. Call after `collect_held`."""
        self._needed = needed
        manifest.publish(self._channel, manifest.needed_key(self.name), needed)

    def _connect(self) -> IncomingBuckets:
        """Plan and connect, once, after all engine ranks have published their slice tables."""
        session, channel = self.session, self._channel
        plan, _ = manifest.plan_update(channel, session, self._held, first=False)
        streams = plan.streams_to(self.rank)
        self._copiers = {stream.number: StreamCopier(stream) for stream in streams}
        incoming = [
            relay for stream in streams for relay in stream_relays(stream, session) if self.rank in relay.readers
        ]
        onward = relays_from(("engine", self.rank), streams, session)
        largest = max((copier.largest for copier in self._copiers.values()), default=0)
        return IncomingBuckets(channel, self.rank, incoming, onward, largest, self._description, self._fingerprinter)

    def _description(self, header: dict[str, Any]) -> str:
        assert self._needed is not None
        return self._copiers[header["stream"]].describe(header["bucket"], self._needed.tensors)

    def begin(self, version: int) -> CompletedHook | None:
        """Start the update to `version`.

        Returns a hook if the update is compared with the trainers' export: pass it each parameter once the parameter is
        complete and before it is post-processed. Otherwise returns None.
        """
        assert self._needed is not None, "call publish_needed first"
        self._heartbeat.begin(version)
        incoming = self._incoming = self._incoming or self._connect()
        self._first = version if self._first is None else self._first
        self._version = version
        self._check = SliceFingerprints(self._needed) if self.session.is_checked(version, self._first) else None
        incoming.begin(version, list(self._copiers))
        self._remaining = {number: len(copier.stream.bucket_elements) for number, copier in self._copiers.items()}
        return None if self._check is None else self._check.add

    def receive(self, target: SliceTarget) -> None:
        """Copy every bucket into `target`.

        Raises WeightSyncError for a wrong version, changed bytes, an abort, or a sender that died or stopped.
        """
        assert self._incoming is not None, "call begin first"
        for bucket in self._incoming.take(sum(self._remaining.values()), self._awaited):
            self._load(self._incoming, bucket, target)

    def stage(self) -> None:
        """Keep the version's buckets in host memory for `load_staged`, in place of the version that it kept before.

        Raises WeightSyncError as `receive` does.
        """
        assert self._incoming is not None and self._check is None, "call begin first; a checked update cannot be staged"
        for bucket in self._incoming.take(sum(self._remaining.values()), self._awaited):
            key = bucket.header["stream"], bucket.header["bucket"]
            if key not in self._staged:
                self._staged[key] = StagedBucket(torch.empty_like(bucket.memory, device="cpu"))
            staged = self._staged[key]
            staged.memory.copy_(bucket.memory)
            staged.fingerprint = bucket.header["fingerprint"]
            self._incoming.timer.lap("load")
            read = bucket.memory if self._fingerprinter.on_device else staged.memory
            self._incoming.acknowledge(bucket, bucket.fingerprint or self._fingerprinter.start(read))
            self._remaining[key[0]] -= 1

    def load_staged(self, target: SliceTarget) -> None:
        """Copy the buckets that `stage` kept into `target`. Raises WeightSyncError if their bytes changed since.

        Their memory stays allocated for the next version.
        """
        for (stream, number), staged in self._staged.items():
            copier = self._copiers[stream]
            written, fingerprint = copier.unpack(number, staged.memory, target.tensor, self._fingerprinter)
            if fingerprint.result() != staged.fingerprint:
                assert self._needed is not None
                raise WeightSyncError(
                    f"receiver {self.name!r} kept {copier.describe(number, self._needed.tensors)} in host memory, and its bytes "
                    "have changed since"
                )
            for parameter, elements in written:
                target.mark_written(parameter, elements)

    def _awaited(self) -> str:
        sources = sorted({self._copiers[number].stream.source for number, left in self._remaining.items() if left})
        return f"a bucket from trainers {sources}"

    def _load(self, incoming: IncomingBuckets, bucket: IncomingBucket, target: SliceTarget) -> None:
        """Copy a bucket's slices into `target`, and acknowledge it."""
        stream = bucket.header["stream"]
        written, fingerprint = self._copiers[stream].unpack(
            bucket.header["bucket"], bucket.memory, target.tensor, self._fingerprinter, bucket.fingerprint
        )
        incoming.timer.lap("load")
        incoming.acknowledge(bucket, fingerprint)
        for parameter, elements in written:  # after verification: the engine may post-process complete parameters
            target.mark_written(parameter, elements)
        incoming.timer.lap("load")
        self._remaining[stream] -= 1

    def finish(self) -> UpdateReport:
        """Report to the senders that the version is loaded. Raises WeightSyncError if the trainers' export differs from it."""
        assert self._incoming is not None, "call receive first"
        timer = self._incoming.timer
        timer.lap("load")
        self._incoming.drain()
        timer.start()
        if self._check is not None:
            self._compare_with_export(self._check)
        timer.lap("check")
        checked = len(self._check.fingerprints) if self._check is not None else 0
        return self._publish_report(self._incoming.report(checked))

    def _compare_with_export(self, check: SliceFingerprints) -> None:
        assert self._needed is not None
        self._channel.publish(f"loaded/{self._version}/{self.name}", check.fingerprints)
        key = f"verdict/{self._version}/{self.name}"
        (wrong,) = self._channel.wait([key], "the trainers to compare with their export", longest_pause=LOAD_PAUSE)
        self._channel.delete([key])
        if wrong:
            raise WeightSyncError(
                f"the weights that receiver {self.name!r} loaded differ from the trainers' export, in {len(wrong)} tensors: "
                + "; ".join(self._origin(name) for name in wrong[:3])
                + ". Sharded weight sync is wrong for this model or layout: set weight_sync.route=full, and report it"
            )

    def _origin(self, tensor: str) -> str:
        """Return a tensor's name with the trainers and buckets that its slices came from."""
        assert self._needed is not None
        buckets = [
            f"bucket {bucket} of stream {number} from trainer {copier.stream.source}"
            for number, copier in self._copiers.items()
            for bucket in range(len(copier.stream.bucket_elements))
            if tensor in copier.names(bucket, self._needed.tensors)
        ]
        return f"{tensor} ({', '.join(buckets)})"
