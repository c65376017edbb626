"""An engine rank's side of full weight sync."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from megarl.platform import select
from megarl.weight_sync.fingerprint import VersionFingerprint, fingerprint
from megarl.weight_sync.full import files
from megarl.weight_sync.full.buckets import BucketEntry, parse, tensor_in
from megarl.weight_sync.full.relay import RelaySender, ack_key, group_name, mismatch, slot_key
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.relay import Relay, full_relays
from megarl.weight_sync.session import FullReport, FullSession, WeightSyncError
from megarl.weight_sync.shared_memory import MappedSlots, remove_stale_files
from megarl.weight_sync.store import StoreChannel


class FullReceiver:
    """Receives versions one after the other. Not thread-safe.

    For each version iterate over all of `weights(version)`, load the tensors, then call `finish()`. On any error call
    `fail(reason)`, which ends the update on all ranks.
    """

    def __init__(self, session: FullSession, name: str) -> None:
        """`name`: of this receiver in `session.receivers`; ValueError if it is not there."""
        transports = dict(session.receivers)
        if name not in transports:
            raise ValueError(f"receiver {name!r} is not part of this session; it has {sorted(transports)}")
        self.name = name
        self._session = session
        self._channel = StoreChannel(session)
        self._incoming: Relay | None = None  # brings buckets here; set once all are connected
        self._group: BroadcastGroup | None = None  # with the holder of `_incoming`, if that crosses a network
        self._onward: RelaySender | None = None  # to other receivers of this host, and to the next host
        self._slots = MappedSlots(session.shm_dir)
        self._copies = _Copies()
        self._next_bucket = 0
        self._pending: FullReport | None = None  # received, not yet loaded
        self._started = 0.0
        self._channel.publish(f"hello/{name}", True)

    def weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (name, tensor) of `version`, on the CPU, in the sender's order.

        Tensors stay valid: they are views of a private copy of their bucket. Raises WeightSyncError for a wrong version,
        changed bytes, an abort, or a sender that died or stopped.
        """
        self._started, self._pending = time.perf_counter(), None
        if self._incoming is None:
            self._incoming = self._connect()
        total = VersionFingerprint()
        nbytes = tensors = buckets = 0
        last = False
        while not last:
            number = self._next_bucket
            (header,) = self._channel.wait([f"bucket/{number}"], f"bucket {number} from the sender")
            if header["version"] != version:
                raise WeightSyncError(f"receiver {self.name!r} expects version {version}, got {header['version']}")
            entries = parse(header["tensors"])
            memory = self._take(number, header, entries, self._incoming)
            value = fingerprint(memory.numpy())
            if value != header["fingerprint"]:
                names = [entry.name for entry in entries]
                raise WeightSyncError(mismatch(self.name, number, names, header["fingerprint"], value))
            self._channel.publish(ack_key(number, self.name), value)
            self._next_bucket += 1
            total.add(header["tensors"], value)
            nbytes, tensors, buckets = nbytes + len(memory), tensors + len(entries), buckets + 1
            last = header["last"]
            for entry in entries:
                yield entry.name, tensor_in(memory, entry)
        if self._onward is not None:
            self._onward.settle()
        self._pending = FullReport(version, total.hexdigest(), nbytes, tensors, buckets, 0.0)

    def _connect(self) -> Relay:
        """Connect with the host before and the host after this one, if any. Returns the relay that brings buckets here."""
        names, relays = [name for name, _ in self._session.receivers], full_relays(self._session)
        rank = names.index(self.name)
        incoming = next(relay for relay in relays if rank in relay.readers)
        onward = next((relay for relay in relays if relay.holder == ("engine", rank)), None)
        if incoming.remote == rank:
            self._channel.wait(["form"], "the sender and all other receivers to connect")
            self._group = BroadcastGroup(self._channel, 1, 2, select("cpu"), group_name(incoming))
        if onward is not None:
            remove_stale_files(self._session.shm_dir)
            self._onward = RelaySender(self._channel, self._session, onward)
            self._onward.connect()
        return incoming

    def _take(self, number: int, header: dict, entries: list[BucketEntry], relay: Relay) -> torch.Tensor:
        """Return a private copy of the bucket's bytes."""
        memory = self._copies.reserve(header["nbytes"])
        if self._session.directory is not None:
            return files.read(header["file"], entries, memory)
        if self._group is None:
            key = slot_key(number, relay.holder)
            ((slot, file),) = self._channel.wait([key], f"bucket {number} in the memory of this host")
            return memory.copy_(self._slots.memory(slot, file)[: header["nbytes"]])
        received = memory
        if self._onward is not None:
            received = self._onward.reserve(number, header["nbytes"], last=header["last"])
        self._group.finish(self._group.start(received), f"the broadcast of bucket {number}")
        if self._onward is not None:
            self._onward.offer(number, received, header["fingerprint"], [entry.name for entry in entries])
            memory.copy_(received)
        return memory

    def finish(self) -> FullReport:
        """Report to the sender that the version is loaded. Raises WeightSyncError if `weights` was not exhausted."""
        if self._pending is None:
            raise WeightSyncError(f"receiver {self.name!r} stopped before the end of the version's weights")
        seconds = time.perf_counter() - self._started
        report = FullReport(**{**self._pending.to_dict(), "seconds": seconds})
        self._channel.publish(f"done/{report.version}/{self.name}", report.to_dict())
        self._pending = None
        self._copies = _Copies()  # frees the memory for the engine between updates
        return report

    def fail(self, reason: str) -> None:
        """Abort the update on all ranks: this receiver could not receive or load it."""
        self._channel.abort(f"receiver {self.name!r}: {reason}")

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._onward is not None:
            self._onward.close()
        self._slots.close()


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


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


(_REFERENCES_OF_FREE,) = _references([np.empty(1)])
