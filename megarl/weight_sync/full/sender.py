"""The trainers' side of full weight sync."""

from __future__ import annotations

import atexit
import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.weight_sync.fingerprint import VersionFingerprint, fingerprint
from megarl.weight_sync.full.buckets import Bucket, describe, fill_buckets, pack
from megarl.weight_sync.full.files import BucketFiles
from megarl.weight_sync.full.relay import RelaySender
from megarl.weight_sync.relay import full_relays
from megarl.weight_sync.session import (
    SHARED_MEMORY_DIR,
    SHARED_MEMORY_TRANSPORTS,
    FullReport,
    FullSession,
    WeightSyncError,
    compare_full_reports,
    host_id,
    resolve_transports,
)
from megarl.weight_sync.shared_memory import remove_stale_files
from megarl.weight_sync.store import StoreChannel


class FullSender:
    """Sends all weights from the trainers' rank 0. Not thread-safe.

    Other trainer ranks only drain the export, which is collective. After an error the session is unusable: close this
    sender and open another.
    """

    def __init__(self, session: FullSession, store: Any) -> None:
        """Use `open` instead. `store`: the session's store, served by this process."""
        self.session = session
        self._channel = StoreChannel(session, store)
        self._connected = False
        self._relay = RelaySender(self._channel, session, full_relays(session)[0])
        self._files = None if session.directory is None else BucketFiles(session.directory)
        self._next_bucket = 0  # counts over all versions; determines slots and keys
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
    ) -> FullSender:
        """Start a session.

        `host`: this machine's address as receivers reach it. `endpoints`: (name, `host_id`) of every receiver. `timeout`:
        seconds of each wait. `directory`: for the files of `transport` "files". `adapter_alpha`: see `FullSession`. Raises
        ValueError if the transport cannot reach a receiver.
        """
        here = host_id(shm_dir)
        transports = resolve_transports(transport, here, endpoints)
        remove_stale_files(shm_dir)
        store = dist.TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False)
        session = FullSession(
            host=host,
            port=store.port,
            prefix=uuid.uuid4().hex,
            receivers=tuple(transports.items()),
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            shm_dir=shm_dir,
            hosts=(here, *(host for _, host in endpoints)),
            shares_memory=transport in SHARED_MEMORY_TRANSPORTS,
            directory=directory if transport == "files" else None,
            adapter_alpha=adapter_alpha,
        )
        return cls(session, store)

    def send(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> FullReport:
        """Send (name, tensor) pairs, on any device, as `version`, and wait until every receiver has loaded it.

        Tensors must not change until their bucket is packed. Raises WeightSyncError if a receiver failed, stopped or got
        other bytes, OSError if /dev/shm is full. On errors `weights` is drained nevertheless, so that the other ranks of a
        collective export can finish.
        """
        iterator = _Drainable(weights)
        try:
            return self._send(version, iterator)
        except BaseException as error:
            with contextlib.suppress(WeightSyncError):  # raised only if this process's store is broken
                self._channel.abort(f"the sender failed: {type(error).__name__}: {error}")
            iterator.drain()
            raise

    def _send(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> FullReport:
        start = time.perf_counter()
        self._channel.raise_if_aborted()
        total = VersionFingerprint()
        nbytes = tensors = buckets = 0
        first = self._next_bucket
        for bucket in fill_buckets(weights, self.session.bucket_bytes):
            self._connect()
            sent = self._put(version, bucket)
            total.add(describe(bucket.entries), sent)
            nbytes, tensors, buckets = nbytes + bucket.nbytes, tensors + len(bucket.entries), buckets + 1
        self._relay.settle()
        report = FullReport(version, total.hexdigest(), nbytes, tensors, buckets, 0.0)
        names = [name for name, _ in self.session.receivers]
        keys = [f"done/{version}/{name}" for name in names]
        loaded = self._channel.wait(keys, f"receivers to finish loading version {version}")
        self._channel.delete([*keys, *(f"bucket/{number}" for number in range(first, self._next_bucket))])
        compare_full_reports(report, {name: FullReport(**values) for name, values in zip(names, loaded, strict=True)})
        return FullReport(**{**report.to_dict(), "seconds": time.perf_counter() - start})

    def _connect(self) -> None:
        """Wait once for every receiver, and connect with the first receiver of the next host."""
        if self._connected:
            return
        self._channel.wait([f"hello/{name}" for name, _ in self.session.receivers], "receivers to connect")
        self._channel.publish("form", True)
        self._relay.connect()
        self._connected = True

    def _put(self, version: int, bucket: Bucket) -> str:
        """Pack and publish a bucket. Returns its fingerprint."""
        number = self._next_bucket
        self._next_bucket += 1
        memory = self._relay.reserve(number, bucket.nbytes, last=bucket.last)
        pack(bucket, memory)
        value = fingerprint(memory.numpy())
        header = {
            "version": version,
            "tensors": describe(bucket.entries),
            "nbytes": bucket.nbytes,
            "last": bucket.last,
            "fingerprint": value,
        }
        if self._files is not None:
            header["file"] = self._files.write(version, bucket.entries, memory)
        self._channel.publish(f"bucket/{number}", header)
        self._relay.offer(number, memory, value, [entry.name for entry in bucket.entries])
        return value

    def close(self) -> None:
        """Free the slots. May be called twice."""
        atexit.unregister(self.close)
        self._relay.close()


class _Drainable:
    """An iterable that can be drained after its consumer failed, unless the iterable itself failed."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._iterator = iter(weights)
        self._ended = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            self._ended = True  # stays set if the next line raises
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
