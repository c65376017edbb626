"""The trainer's side of the weight exchange."""

from __future__ import annotations

import atexit
import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.exchange.buckets import Bucket, describe, fill_buckets, pack
from megarl.exchange.channel import Channel
from megarl.exchange.collective import BroadcastGroup
from megarl.exchange.files import BucketFiles
from megarl.exchange.fingerprint import VersionFingerprint, fingerprint
from megarl.exchange.session import (
    EXPORT_SLOTS,
    SHARED_MEMORY_DIR,
    ExchangeError,
    ExchangeSession,
    UpdateReport,
    compare_reports,
    host_id,
    resolve_transports,
    shown,
)
from megarl.exchange.slots import PrivateSlot, SharedSlot, remove_stale_files
from megarl.platform import select


@dataclass
class _InFlight:
    """A bucket that not everyone has acknowledged yet."""

    number: int
    fingerprint: str
    names: list[str]
    slot: SharedSlot | PrivateSlot
    broadcast: Any  # a gloo work, where there are remote receivers


class WeightSender:
    """Owned by the trainer's rank 0, the source of all weights. Not thread-safe.

    Other trainer ranks only drain the export, which is collective. After an error the session is
    dead: close this sender and open another one.
    """

    def __init__(self, session: ExchangeSession, store: Any) -> None:
        """Use `open`. `store` is the session's key-value store, served by this process."""
        self.session = session
        self._channel = Channel(session, store)
        self._group: BroadcastGroup | None = None
        self._connected = False
        shared = any(transport == "shared_memory" for _, transport in session.receivers)
        self._slots = [
            SharedSlot(session.shm_dir) if shared else PrivateSlot(select("cpu").device()) for _ in range(EXPORT_SLOTS)
        ]
        self._files = None if session.directory is None else BucketFiles(session.directory)
        self._in_flight: list[_InFlight] = []  # oldest first, at most one a slot
        self._next_bucket = 0  # counts over versions: slots and keys follow from it
        atexit.register(self.close)

    @classmethod
    def open(
        cls,
        host: str,
        endpoints: Sequence[tuple[str, str]],
        *,
        transport: str = "auto",
        bucket_bytes: int,
        timeout: float,
        shm_dir: str = SHARED_MEMORY_DIR,
        directory: str | None = None,
        adapter_alpha: float | None = None,
    ) -> WeightSender:
        """Start a session. `host`: this machine's address as receivers reach it. `endpoints`: (name,
        `host_id`) of every receiver. `timeout`: seconds that any one wait may take. `directory`: where `transport` "files"
        puts them. `adapter_alpha`: see `ExchangeSession`.

        Raises ValueError where the transport cannot reach a receiver.
        """
        transports = resolve_transports(transport, host_id(shm_dir), endpoints)
        remove_stale_files(shm_dir)
        store = dist.TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False)
        session = ExchangeSession(
            host=host,
            port=store.port,
            prefix=uuid.uuid4().hex,
            receivers=tuple(transports.items()),
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            shm_dir=shm_dir,
            directory=directory if transport == "files" else None,
            adapter_alpha=adapter_alpha,
        )
        return cls(session, store)

    def send(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> UpdateReport:
        """Send (name, tensor) pairs, on any device, as `version`; returns when every receiver has loaded it.

        Tensors may not change or be reused until their bucket is packed. Raises ExchangeError where
        a receiver failed, fell silent or got other bytes, OSError where /dev/shm is full. `weights`
        is then drained all the same, so that the other ranks of a collective export come through.
        """
        iterator = _Drainable(weights)
        try:
            return self._send(version, iterator)
        except BaseException as error:
            with contextlib.suppress(ExchangeError):  # only where this process's own store is broken
                self._channel.abort(f"the sender failed: {type(error).__name__}: {error}")
            iterator.drain()
            raise

    def _send(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> UpdateReport:
        start = time.perf_counter()
        self._channel.raise_if_aborted()
        total = VersionFingerprint()
        nbytes = tensors = buckets = 0
        for bucket in fill_buckets(weights, self.session.bucket_bytes):
            self._connect()
            sent = self._put(version, bucket)
            total.add(describe(bucket.entries), sent)
            nbytes, tensors, buckets = nbytes + bucket.nbytes, tensors + len(bucket.entries), buckets + 1
        while self._in_flight:
            self._await_oldest()
        report = UpdateReport(version, total.hexdigest(), nbytes, tensors, buckets, 0.0)
        names = [name for name, _ in self.session.receivers]
        keys = [f"done/{version}/{name}" for name in names]
        loaded = self._channel.wait(keys, f"receivers to finish loading version {version}")
        self._channel.delete(keys)
        compare_reports(report, {name: UpdateReport(**values) for name, values in zip(names, loaded, strict=True)})
        return UpdateReport(**{**report.to_dict(), "seconds": time.perf_counter() - start})

    def _connect(self) -> None:
        """Once: wait for every receiver to be there, and form the collective."""
        if self._connected:
            return
        self._channel.wait([f"hello/{name}" for name, _ in self.session.receivers], "receivers to connect")
        if self.session.remote:
            self._channel.publish("form", True)
            self._group = BroadcastGroup(self._channel, 0, len(self.session.remote) + 1, select("cpu"))
        self._connected = True

    def _put(self, version: int, bucket: Bucket) -> str:
        """Pack and publish a bucket; returns its fingerprint."""
        if len(self._in_flight) == EXPORT_SLOTS:
            self._await_oldest()
        number = self._next_bucket
        self._next_bucket += 1
        slot = self._slots[number % EXPORT_SLOTS]
        # More will come: a full-sized slot now saves growing it bucket by bucket.
        slot.reserve(bucket.nbytes if bucket.last else max(bucket.nbytes, self.session.bucket_bytes))
        memory = slot.reserve(bucket.nbytes)
        pack(bucket, memory)
        value = fingerprint(memory.numpy())
        header = {
            "version": version,
            "tensors": describe(bucket.entries),
            "nbytes": bucket.nbytes,
            "last": bucket.last,
            "fingerprint": value,
            "slot": number % EXPORT_SLOTS,
            "file": slot.name,
        }
        if self._files is not None:
            header["file"] = self._files.write(version, bucket.entries, memory)
        self._channel.publish(f"bucket/{number}", header)
        broadcast = self._group.start(memory) if self._group is not None else None
        self._in_flight.append(_InFlight(number, value, [e.name for e in bucket.entries], slot, broadcast))
        return value

    def _await_oldest(self) -> None:
        """Wait until every receiver holds the oldest bucket, so that its slot is free."""
        bucket = self._in_flight[0]
        if bucket.broadcast is not None:
            assert self._group is not None
            self._group.finish(bucket.broadcast, f"the broadcast of bucket {bucket.number}")
        keys = [f"ack/{bucket.number}/{name}" for name, _ in self.session.receivers]
        values = self._channel.wait(keys, f"acknowledgements of bucket {bucket.number}")
        for (name, _), value in zip(self.session.receivers, values, strict=True):
            if value != bucket.fingerprint:
                raise ExchangeError(mismatch(name, bucket.number, bucket.names, bucket.fingerprint, value))
        bucket.slot.unlink()
        self._channel.delete([*keys, f"bucket/{bucket.number}"])
        self._in_flight.pop(0)

    def close(self) -> None:
        """Give the slots' memory back. May be called twice."""
        atexit.unregister(self.close)
        if self._group is not None:
            self._group.close()
        for slot in self._slots:
            slot.close()


def mismatch(receiver: str, bucket: int, names: Sequence[str], sent: str, received: str) -> str:
    """The message for bytes that changed on their way."""
    return (
        f"receiver {receiver!r} got other bytes than were sent in bucket {bucket} ({shown(names)}): "
        f"fingerprint {received}, sent {sent}"
    )


class _Drainable:
    """An iterable that can be run to its end after its consumer gave up, unless it failed itself."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._iterator = iter(weights)
        self._ended = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            self._ended = True  # holds if the next line raises, for whatever reason
            try:
                item = next(self._iterator)
            except StopIteration:
                return
            self._ended = False
            yield item

    def drain(self) -> None:
        if not self._ended:
            for _ in self._iterator:
                continue
