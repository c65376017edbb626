"""The trainers' side of full weight sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.weight_sync.fingerprint import VersionFingerprint, fingerprint
from megarl.weight_sync.full.buckets import Bucket, describe, describe_bucket, fill_buckets, pack
from megarl.weight_sync.full.files import BucketFiles
from megarl.weight_sync.outgoing import OutgoingBuckets, form_links
from megarl.weight_sync.relay import full_relays
from megarl.weight_sync.sender import Export, Sender, start_session
from megarl.weight_sync.session import SHARED_MEMORY_DIR, PhaseTimer, UpdateReport, host_id, stream_key

# Full sync packs into host memory: the transports with the same hosts and memory.
_HOST_TRANSPORTS = {"device": "collective", "ipc": "auto"}


class FullSender(Sender):
    """Sends all weights from the trainers' rank 0, as one stream of buckets that describe their contents.

    Other trainer ranks only drain the export, which is collective (`ExportingRank`). Tensors of the export must not change until
    their bucket is packed.
    """

    @classmethod
    def open(
        cls,
        host: str,
        receivers: Sequence[tuple[str, str]],
        *,
        bucket_bytes: int,
        timeout: float,
        heartbeat_timeout: float,
        transport: str = "auto",
        shm_dir: str = SHARED_MEMORY_DIR,
        directory: str | None = None,
        adapter_alpha: float | None = None,
    ) -> FullSender:
        """Start a session.

        `host`: this machine's address as receivers reach it. `receivers`: (name, `host_id`) of each. `directory`: for the files
        of `transport` "files". Raises ValueError if the transport cannot reach a receiver.
        """
        session, store = start_session(
            host,
            [host_id(shm_dir)],
            receivers,
            transport=_HOST_TRANSPORTS.get(transport, transport),
            timeout=timeout,
            sharded=False,
            bucket_bytes=bucket_bytes,
            heartbeat_timeout=heartbeat_timeout,
            shm_dir=shm_dir,
            directory=directory if transport == "files" else None,
            adapter_alpha=adapter_alpha,
        )
        return cls(session, 0, store)

    def _join(self) -> None:
        directory = self.session.directory
        self._files = None if directory is None else BucketFiles(directory)
        self._relay = full_relays(self.session)[0]

    def _send(self, version: int, export: Export) -> UpdateReport:
        timer = PhaseTimer("pack", "fingerprint", "wait")
        total = VersionFingerprint()
        nbytes = buckets = 0
        for bucket in fill_buckets(export(), self.session.bucket_bytes):
            timer.lap("pack")
            outgoing = self._outgoing = self._outgoing or self._connect()
            # Unless it is the last bucket, allocate the full size now instead of growing bucket by bucket.
            reserve = 0 if bucket.last else self.session.bucket_bytes
            memory = outgoing.claim(bucket.nbytes, reserve=reserve)
            timer.lap("wait")
            pack(bucket, memory.memory)
            timer.lap("pack")
            header = self._header(version, buckets, bucket, memory.memory) | {"reserve": reserve}
            total.add(header["content"], header["fingerprint"])
            timer.lap("fingerprint")
            names = [entry.name for entry in bucket.entries]
            outgoing.send(memory, self._relay, header, describe_bucket(buckets, names))
            nbytes, buckets = nbytes + bucket.nbytes, buckets + 1
        assert self._outgoing is not None, "an export without weights is an error"
        self._outgoing.drain()
        timer.lap("wait")
        streams = {stream_key(0, name): total.hexdigest() for name in self.session.names}
        return UpdateReport(version, streams, nbytes, buckets, 0, timer.seconds)

    def _connect(self) -> OutgoingBuckets:
        """Wait for every receiver, and connect with the readers of this rank."""
        session, channel, relay = self.session, self._channel, self._relay
        channel.wait([f"hello/{name}" for name in session.names], "receivers to connect")
        channel.publish("form", True)
        outgoing = self._outgoing = OutgoingBuckets(channel, session, relay.holder, [relay], 0)
        outgoing.connect(form_links(channel, session, relay.holder, [relay]))
        self._targets = list(range(len(session.receivers)))
        return outgoing

    def _header(self, version: int, number: int, bucket: Bucket, memory: torch.Tensor) -> dict:
        return {
            "version": version,
            "stream": 0,
            "bucket": number,
            "content": describe(bucket.entries),
            "nbytes": bucket.nbytes,
            "last": bucket.last,
            "fingerprint": fingerprint(memory.numpy()),
            "file": None if self._files is None else self._files.write(version, bucket.entries, memory),
        }
