"""An engine rank's side of full weight sync."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megarl.weight_sync.full import files
from megarl.weight_sync.full.buckets import BucketEntry, describe_bucket, parse, tensor_in
from megarl.weight_sync.incoming import IncomingBucket, IncomingBuckets
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.relay import full_relays
from megarl.weight_sync.session import Session, UpdateReport, WeightSyncError


class FullReceiver(Receiver):
    """For each version iterate over all of `weights(version)`, load the tensors, then call `finish()`."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name)
        self._copies = _Copies()
        self._complete = False  # all weights of the version have been received
        self._channel.publish(f"hello/{name}", True)

    def weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (name, tensor) of `version`, on the CPU, in the sender's order.

        Tensors stay valid: they are views of a private copy of their bucket. Raises WeightSyncError for a wrong version,
        changed bytes, an abort, or a sender that died or stopped.
        """
        self._complete = False
        self._heartbeat.begin(version)
        incoming = self._incoming = self._incoming or self._connect()
        timer = incoming.begin(version, [0])
        for bucket in incoming.take(math.inf, lambda: "a bucket from trainer 0"):
            entries = parse(bucket.header["content"])
            memory = self._take(bucket, entries)
            timer.lap("wait")
            incoming.acknowledge(bucket, bucket.fingerprint or self._fingerprinter.start(memory))
            for entry in entries:
                yield entry.name, tensor_in(memory, entry)
            timer.lap("load")
        incoming.drain()
        timer.lap("wait")
        self._complete = True

    def _connect(self) -> IncomingBuckets:
        """Connect with the host before and the host after this one, if any."""
        relays = full_relays(self.session)
        incoming = [relay for relay in relays if self.rank in relay.readers]
        onward = [relay for relay in relays if relay.holder == ("engine", self.rank)]
        self._channel.wait(["form"], "the sender and all other receivers to connect")

        def describe(header: dict[str, Any]) -> str:
            return describe_bucket(header["bucket"], [entry.name for entry in parse(header["content"])])

        copies = self._copies
        return IncomingBuckets(
            self._channel,
            self.rank,
            incoming,
            dict(enumerate(onward)),
            0,
            describe,
            self._fingerprinter,
            copies.reserve,
        )

    def _take(self, bucket: IncomingBucket, entries: list[BucketEntry]) -> torch.Tensor:
        """Return a private copy of the bucket's bytes."""
        if bucket.group is not None and bucket.relayed is None:
            return bucket.memory
        memory = self._copies.reserve(bucket.header["nbytes"])
        if bucket.header["file"] is not None:
            return files.read(bucket.header["file"], entries, memory)
        return memory.copy_(bucket.memory)

    def finish(self) -> UpdateReport:
        """Report to the sender that the version is loaded. Raises WeightSyncError if `weights` was not exhausted."""
        if not self._complete or self._incoming is None:
            raise WeightSyncError(f"receiver {self.name!r} stopped before the end of the version's weights")
        self._incoming.timer.lap("load")
        self._complete = False
        self._copies.clear()
        return self._publish_report(self._incoming.report())


class _Copies:
    """Memory for copies of buckets, reused once no tensor refers to it.

    Fresh memory costs a page fault every 4 KiB: copying into it is about a third as fast. A tensor made by `from_numpy`
    holds a reference to its array, and so does every view of it. So the array's reference count shows whether it is free.
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def reserve(self, size: int) -> torch.Tensor:
        """Return uint8 [size] that nothing else refers to."""
        for array, references in zip(self._arrays, _references(self._arrays), strict=True):
            if len(array) >= size and references == _REFERENCES_OF_FREE:
                return torch.from_numpy(array)[:size]
        self._arrays.append(np.empty(size, np.uint8))
        return torch.from_numpy(self._arrays[-1])

    def clear(self) -> None:
        """Free the memory, for the engine between updates."""
        self._arrays.clear()


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


(_REFERENCES_OF_FREE,) = _references([np.empty(1)])
